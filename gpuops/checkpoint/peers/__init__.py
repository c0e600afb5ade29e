"""Copies of states on other nodes.

`push` sends what this node saved to its holders, `store` keeps what other nodes sent, `source`
serves both to whoever restores, `fetch` gets the shards of one state, `service` connects them to
the keeper.
"""
