"""One adapter for each kind of part of a training state, and loading it.

`adapter.StateAdapter` is what a part does: `read` for saving, `plan_load` for restoring. `model`,
`optimizer`, `rng` and `objects` implement it. `saved_state` opens the images of a state;
`resharding` loads tensors saved in other shards (torch does the work); `parallel_copy` fills
tensors with several threads; `replicated` says which tensors must be equal on which ranks.
"""
