"""The commands: each file parses, calls one function and prints."""
