"""Formats that two processes share: JSON `messages`, and the heartbeat `ring` of one rank."""
