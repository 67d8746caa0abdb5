"""Throughput of a network against threads, and against windows that run at once.

    python benchmarks/threads.py [--networks UNet DynUNet] [--engines torch openvino]
        [--windows 32 64 96] [--threads 1 2] [--seconds 5]

Each network has random weights. For each number of threads, one window runs with all of them, then
as many windows at once as there are threads, each with one: a small window or network may not fill
all cores. Each combination runs in a process of its own. Prints windows per second and processor
seconds a window, and the ratio of throughput to one window on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engines import NAMES, TORCH, image, prepared
from meter import Failed, machine, parse, run, table

HEAD = (
    *("network", "window", "engine", "threads", "windows at once"),
    *("windows a second", "x one thread", "cpu s a window"),
)


def child(given: argparse.Namespace) -> None:
    """Run windows for some seconds, `at_once` of them side by side; print the rates."""
    import torch

    name, engine, window, threads, at_once = given.child
    window, threads, at_once = int(window), int(threads), int(at_once)
    torch.set_num_threads(threads // at_once)
    values = image(window)
    runs = [prepared(name, engine, "float32", window)[0] for _ in range(at_once)]

    def work(runner: Any) -> int:
        torch.set_num_threads(threads // at_once)
        done, began = 0, time.perf_counter()
        with torch.inference_mode():
            while time.perf_counter() - began < given.seconds:
                runner(values)
                done += 1
        return done

    with torch.inference_mode():
        for runner in runs:
            runner(values)  # the first pass takes longer
    began, spent = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(at_once) as pool:
        done = sum(pool.map(work, runs))
    rate = done / (time.perf_counter() - began)
    print(json.dumps({"rate": rate, "cpu": (time.process_time() - spent) / done}))


def rows_of(name: str, engine: str, window: int, given: argparse.Namespace) -> list[list[Any]]:
    """Return a row for each number of threads and of windows at once."""
    rows, first = list[list[Any]](), 0.0
    for threads in given.threads:
        for at_once in dict.fromkeys((1, threads)):
            combination = [name, engine, window, threads, at_once]
            command = [sys.executable, __file__, "--seconds", str(given.seconds), "--child"]
            try:
                spent = run([*command, *map(str, combination)], {"OMP_NUM_THREADS": str(threads)})
            except Failed as exc:
                print(f"not measured: {combination}: {exc}", file=sys.stderr)
                continue
            rate, cpu = spent.answer["rate"], spent.answer["cpu"]
            first = first or rate
            rows.append([name, window, engine, threads, at_once, rate, rate / first, cpu])
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = len(os.sched_getaffinity(0))
    some = sorted({1, *(2**n for n in range(1, 8) if 2**n <= cores), cores})
    parser.add_argument("--networks", nargs="+", choices=NAMES, default=["UNet", "DynUNet"])
    parser.add_argument("--engines", nargs="+", default=[TORCH, "openvino"])
    parser.add_argument("--windows", type=int, nargs="+", default=[32, 64, 96])
    parser.add_argument("--threads", type=int, nargs="+", default=some)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each combination")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    return parse(
        parser, networks=["UNet"], engines=[TORCH], windows=[32], threads=[1, 2], seconds=0.5
    )


def main() -> None:
    """Measure and print."""
    given = arguments()
    if given.child:
        child(given)
        return
    print(machine("scanloom", "torch", "openvino"), "\n")
    rows: list[list[Any]] = []
    for name in given.networks:
        for engine in given.engines:
            for window in given.windows:
                rows += rows_of(name, engine, window, given)
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
