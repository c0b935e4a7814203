"""The commands, a file each; what several of them need lies beside this folder."""
