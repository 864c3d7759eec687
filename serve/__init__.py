"""The product surface of KVarN: the command line and the server."""
