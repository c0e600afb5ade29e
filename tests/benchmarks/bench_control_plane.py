"""The board's server with up to 4,096 agents without workers: is its cost per agent constant?

The server is the real process; agents are simulated in two other processes that speak the real
protocol, each agent with its two connections and one held heartbeat. Quiet time is measured first,
then the time from a changed record until the last agent has it. One more client lists every
heartbeat once a hold, as the leader does. Run as a script:

    python tests/benchmarks/bench_control_plane.py --agents 64 512 4096 --out control_plane.json
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.board_agents import Crowd
from support.boards import RUN_KEY, TOKEN, server, tcp_board

from gpuops.control.record import RECORD_KEY

PROCESSES = 2
RECORD_BYTES = 1000
PATIENCE_S = 300


async def crowd_of(pipe, port, names, hold_s):
    """Be these agents until told to end; answer what was counted."""
    loop = asyncio.get_running_loop()
    crowd = Crowd(port, RUN_KEY, TOKEN, hold_s, names)
    await crowd.enter()
    pipe.send("in")
    told = asyncio.Queue()
    loop.add_reader(pipe.fileno(), lambda: told.put_nowait(pipe.recv()))
    while (word := await told.get()) != "end":
        if word == "count":
            pipe.send(crowd.counts())
        else:
            pipe.send(await crowd.all_saw(word))
    loop.remove_reader(pipe.fileno())
    crowd.leave()
    pipe.send(crowd.lost)


def be_agents(*given):
    """Run one process of agents."""
    asyncio.run(crowd_of(*given))


def ask(pipes, word):
    """Tell *word* to every process; return their answers."""
    for pipe in pipes:
        pipe.send(word)
    return [hear(pipe) for pipe in pipes]


def hear(pipe):
    """Return the next answer; raise where none comes."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("a process of agents does not answer")
    return pipe.recv()


def list_like_a_leader(board, hold_s, stop, took_s):
    """List every heartbeat once a hold, noting how long it took."""
    while not stop.wait(hold_s):
        began_s = time.monotonic()
        board.list("run/alive/")
        took_s.append(time.monotonic() - began_s)


def measure(n_agents, hold_s, quiet_s, changes):
    """Return the figures for *n_agents*."""
    context = multiprocessing.get_context("spawn")
    names = [f"agent-{number:06d}" for number in range(n_agents)]
    pipes, processes = [], []
    with server() as board_server:
        board = tcp_board(board_server.port, deadline_s=60)
        leader = tcp_board(board_server.port, deadline_s=60)
        watched = psutil.Process(board_server.pid)
        stop, lists_s = threading.Event(), []
        thread = threading.Thread(
            target=list_like_a_leader, args=(leader, hold_s, stop, lists_s), daemon=True
        )
        try:
            board.put(RECORD_KEY, os.urandom(RECORD_BYTES))
            for number in range(PROCESSES):
                ours, theirs = context.Pipe()
                given = (theirs, board_server.port, names[number::PROCESSES], hold_s)
                processes.append(context.Process(target=be_agents, args=given, daemon=True))
                pipes.append(ours)
                processes[-1].start()
            began_s = time.monotonic()
            for pipe in pipes:
                assert hear(pipe) == "in"
            entered_s = time.monotonic() - began_s
            thread.start()
            ask(pipes, 1)
            figures = quiet(pipes, watched, n_agents, quiet_s)
            seen_s = [spread(board, pipes, watched, 2 + n, hold_s) for n in range(changes)]
            lost = sum(ask(pipes, "end"))
        finally:
            stop.set()
            thread.join(60)
            board.close()
            leader.close()
            for process in processes:
                process.join(10)
                process.kill()
    return {
        "agents": n_agents,
        **figures,
        "agree_s_median": round(statistics.median(s for s, _cpu_s in seen_s), 4),
        "agree_s_max": round(max(s for s, _cpu_s in seen_s), 4),
        "agree_server_cpu_s": round(statistics.mean(cpu_s for _s, cpu_s in seen_s), 4),
        "entered_s": round(entered_s, 2),
        "leader_list_ms": round(1000 * statistics.median(lists_s), 2),
        "connections_lost": lost,
    }


def quiet(pipes, watched, n_agents, quiet_s):
    """Return what a time without news costs."""
    before, cpu, began_s = ask(pipes, "count"), watched.cpu_times(), time.monotonic()
    threading.Event().wait(quiet_s)
    after, cpu_then, took_s = ask(pipes, "count"), watched.cpu_times(), time.monotonic() - began_s
    requests, sent, received = [
        sum(b[place] - a[place] for a, b in zip(before, after, strict=True)) for place in range(3)
    ]
    cpu_s = cpu_then.user + cpu_then.system - cpu.user - cpu.system
    return {
        "requests_per_agent_s": round(requests / n_agents / took_s, 3),
        "bytes_per_agent_s": round((sent + received) / n_agents / took_s, 1),
        "requests_per_s": round(requests / took_s),
        "server_cpu": round(cpu_s / took_s, 4),
        "server_cpu_us_per_request": round(1e6 * cpu_s / max(requests, 1), 1),
        "server_rss_mib": round(watched.memory_info().rss / 2**20, 1),
    }


def spread(board, pipes, watched, version, hold_s):
    """Change the record; return the seconds until the last agent has it, and the server's own."""
    # At another moment of the heartbeats each time.
    threading.Event().wait(hold_s * 0.37)
    began_s, cpu = time.monotonic(), watched.cpu_times()
    board.put(RECORD_KEY, os.urandom(RECORD_BYTES))
    took_s = max(ask(pipes, version)) - began_s
    cpu_then = watched.cpu_times()
    return took_s, cpu_then.user + cpu_then.system - cpu.user - cpu.system


def main():
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--hold", type=float, default=2.0, help="seconds a heartbeat is held")
    parser.add_argument("--quiet", type=float, default=20.0, help="seconds without news")
    parser.add_argument("--changes", type=int, default=10, help="of the record")
    parser.add_argument("--out", type=Path, help="write the figures to this file as JSON")
    args = parser.parse_args()
    rounds = [measure(n, args.hold, args.quiet, args.changes) for n in args.agents]
    print(f"{'agents':>7} {'requests':>18} {'bytes':>17} {'server CPU':>11} {'RSS':>8}", end="")
    print(f" {'all agree, median':>18} {'worst':>8} {'leader lists':>13}")
    for row in rounds:
        print(
            f"{row['agents']:>7} {row['requests_per_agent_s']:>10} /agent/s"
            f" {row['bytes_per_agent_s']:>8} /agent/s {100 * row['server_cpu']:>9.1f} %"
            f" {row['server_rss_mib']:>4.0f} MiB {1000 * row['agree_s_median']:>15.1f} ms"
            f" {1000 * row['agree_s_max']:>5.1f} ms {row['leader_list_ms']:>10.1f} ms"
        )
    if args.out:
        body = {"benchmark": "control_plane", "hold_s": args.hold, "rounds": rounds}
        args.out.write_text(json.dumps(body, indent=2) + "\n")
    return 1 if any(row["connections_lost"] for row in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
