"""The processes of one host."""

import os
import sys

from meshtrain.supervise.workers import RankAssignment, Workers


def test_processes_get_their_ranks_in_variables(tmp_path):
    lines = []
    code = (
        "import os; print(*(os.environ[n] for n in ('JAX_PROCESS_ID', 'LOCAL_RANK', "
        "'LOCAL_WORLD_SIZE')))"
    )
    workers = Workers(
        [sys.executable, "-c", code],
        environ=dict(os.environ),
        local_id=1,
        num_supervisors=2,
        logs=None,
        show=lambda rank, line: lines.append((rank, line)),
    )
    workers.start(RankAssignment("127.0.0.1:1", 8, 6, 2))
    exits = []
    while len(exits) < 2:
        workers.poll(0.05)
        exits += workers.new_exits()
    workers.close()
    assert sorted(lines) == [(6, "6 2 4"), (7, "7 3 4")] and {one.code for one in exits} == {0}
