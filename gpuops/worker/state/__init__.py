"""One adapter for each kind of part of a training state, and loading it.

`adapter.StateAdapter` is the interface of a part: `read` for saving, `plan_load` for restoring.
`model`, `optimizer`, `zero_optimizer` and `objects` implement it. `saved_state` opens the images of
a state; `resharding` loads tensors saved in other shards (torch does the work) and determines which
tensors are replicated on which ranks; `parallel_copy` fills tensors with several threads.
"""
