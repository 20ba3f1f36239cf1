"""What a step holds and does depends on no step before it."""

import subprocess
import sys

# In a process of its own: DTensor learns the shapes of results once.
TWICE = """
from lss.config import Config, ParallelConfig
from lss.plan.setup import Setup, trace_step

setup = Setup("", Config(parallel=ParallelConfig(2, shard_parameters=True)), "cuda")
first, second = trace_step(setup), trace_step(setup)
assert first.events == second.events
assert [made.size for made in first.allocations] == [made.size for made in second.allocations]
"""


def test_the_first_step_of_a_process_is_as_the_second():
    subprocess.run([sys.executable, "-c", TWICE], check=True, timeout=120)
