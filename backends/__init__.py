"""The two backends of KVarN, one folder each; loaded by name through `kvarn.backend`."""
