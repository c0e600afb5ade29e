"""The code inside a training process. `api` and `checkpointer` are public.

* `shim`: started by ``gpuops run`` in place of the user's script: heartbeats, failure file.
* `heartbeat`, `optimizer_hook`: one beat per optimizer step, without changes to the script.
* `recorder`: torch's flight recorder, served to the agent.
* `checkpointer.Checkpointer`: three lines in a script. A save goes `schedule` -> `saver`
  (acquires a slot) -> `staging` (reads tensors and everything else at one moment, and copies them).
  A load goes `map_ahead` -> `keeper_finder` -> `restore` -> `state.saved_state`.
* `keeper_session`: retries after an error of the keeper. `save_stats`: counts and warnings.
* `state`: one adapter for each kind of part: model, optimizer, RNG, objects.
* `final_save`, `preemption`: the state after the last step; SIGTERM as a flag.
* `adapters`: DCP, Hugging Face, Lightning. `bench`: ``gpuops ckpt bench``.

A failure here is logged once, and training continues.
"""
