"""Ctrl-C in a process that runs nothing but a long call."""

import signal
import subprocess
import sys
import time

LOOP = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored
{before}
print("ready", flush=True)
try:
    while True:
        {work}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def seconds_to_end(before: str, work: str) -> float:
    """How long after Ctrl-C a process ends that does `work`, a line of Python, again and again."""
    text = LOOP.format(before=before, work=work)
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        start = time.perf_counter()
        assert process.stdout.readline() == "interrupted\n"
        seconds = time.perf_counter() - start
        process.wait(timeout=30)
    return seconds
