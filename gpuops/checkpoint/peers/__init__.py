"""Copies of states on other nodes.

`push` sends what this node saved to its holders, without what these hold `alike`; `store` has the
replicas that other nodes sent, `source` serves both, `fetch` gets the shards of one state,
`service` connects them to the keeper.
"""
