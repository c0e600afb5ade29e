"""Detect what slows or stops a job, from what its ranks recorded. Pure: no torch, no processes.

`recorder_dump` reads the flight recorder of torch, one dump a rank, into a `RankDump`.
`wait_graph` says of the dumps of a hung job which ranks the others wait for (`diagnose`);
`last_calls` makes dumps so small that an agent sends them to the leader with its report.
`slow_rank` names the ranks that take longer than those that do the same work; `step_table` reads
their times from the table of a recorded job. `own_time` takes them from the dumps of a job that
runs, `step_summary` packs them for the leader, `step_time` says when all steps became slower.
`step_trace` reads what ``gpuops run --record-steps`` wrote.

Nothing here reads a clock or a file: the same dumps always have the same verdict, whether an agent
took them or ``gpuops detect replay`` reads them somewhere else.
"""
