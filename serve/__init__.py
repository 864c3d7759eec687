"""The product surface of KVarN: the command line and, later, the server."""
