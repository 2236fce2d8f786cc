"""What hosts_test starts twice: a host that exchanges, puts its rows on its device, and makes one update.

    python tests/two_hosts.py PORT PROCESS FILE
"""

from __future__ import annotations

import pathlib
import pickle
import sys

import learner_test
import numpy as np

from covsero_jax import hosts, learner, sharding


def main(port: str, process: str, out: str) -> None:
    import jax

    me = int(process)
    hosts.connect(f'localhost:{port}', 2, me, timeout_s=60)
    found = {'count': hosts.count(), 'is_main': hosts.is_main(), 'share': list(hosts.my_share(5)),
             'exchanged': hosts.exchange('x' * (1 + 1000 * me))}
    mesh = sharding.make_mesh(data=1, fsdp=2)
    tx = learner.make_optimizer(learner_test.OPTIMIZER)
    state = learner.create_state(learner_test.make_params(), tx, mesh, learner_test.CONFIG)
    minibatch = learner_test.make_batch()
    placed = learner_test.put(mesh, minibatch)
    found['rows_here'] = [x.data.shape[0] for x in placed[0].advantage_B.addressable_shards]
    found['fetched'] = hosts.fetch(placed[0].advantage_B)
    counts = learner.objective.counts_of(minibatch, learner_test.LOSS)
    state, metrics = learner.make_train_step(learner_test.CONFIG, learner_test.LOSS, tx, mesh)(state, placed, counts=counts)
    local, params = hosts.local_copy(mesh, state.params)
    assert local.size == 1 and all(x.is_fully_addressable for x in jax.tree.leaves(params))
    found['metrics'] = {name: float(value) for name, value in metrics.items()}
    found['params'] = jax.tree.map(np.asarray, params)
    pathlib.Path(out).write_bytes(pickle.dumps(found))


if __name__ == '__main__':
    main(*sys.argv[1:])
