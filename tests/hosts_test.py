"""Two hosts are as one: real processes on one machine, each with its own workers and its own device."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import time

import jax
import learner_test
import numpy as np
import pytest

from covsero_jax import hosts

ROOT = pathlib.Path(__file__).parent.parent
RUN = ['-m', 'experiments.train', '--config=configs/alfworld_covsero.py:smoke', '--config.rollout.num_groups=3',
       '--config.debug.compilation_cache=False', '--config.checkpoint.every=1']


def free_port() -> int:
    with socket.socket() as found:
        found.bind(('localhost', 0))
        return found.getsockname()[1]


def start(arguments, cache: pathlib.Path) -> subprocess.Popen:
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'COVSERO_CACHE': str(cache), 'PYTHONPATH': str(ROOT)}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def start_hosts(workdir: pathlib.Path, cache: pathlib.Path, *more: str) -> list[subprocess.Popen]:
    port = free_port()
    return [start([*RUN, f'--workdir={workdir}', '--config.mesh.fsdp=2', f'--coordinator=localhost:{port}', '--num_processes=2',
                   f'--process_id={i}', '--host_timeout_s=20', *more], cache) for i in range(2)]


def finish(processes) -> list[str]:
    outputs = [process.communicate(timeout=1500)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), '\n'.join(outputs)[-4000:]
    return outputs


def metrics_of(workdir: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """The same episodes, letter for letter but for rounding in their columns; the same measurements but for time."""
    for update in (1, 2):
        lines = [(w / 'trajectories' / f'update_{update:05d}.jsonl').read_text().splitlines() for w in (one, other)]
        for a, b in zip(*map(lambda part: map(json.loads, part), lines), strict=True):
            assert [s['reply'] for s in a['steps']] == [s['reply'] for s in b['steps']]
            assert (a['task'], a['group'], a['member'], a['success']) == (b['task'], b['group'], b['member'], b['success'])
    for a, b in zip(metrics_of(one), metrics_of(other), strict=True):
        a, b = ({k: v for k, v in row.items() if not k.startswith(('time/', 'logprob/sampler_gap', 'compiled/'))} for row in (a, b))
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_one_host_has_everything_and_exchanges_with_itself():
    assert (hosts.count(), hosts.is_main(), list(hosts.my_share(3))) == (1, True, [0, 1, 2])
    value = object()
    assert hosts.exchange(value)[0] is value
    params = {'x': np.ones(3)}
    assert hosts.local_copy('mesh', params) == ('mesh', params)


@pytest.mark.parametrize('given', [('localhost:1', 0, -1), ('', 2, 0), ('localhost:1', 2, 2)])
def test_flags_of_a_coordinator_belong_together(given):
    with pytest.raises(hosts.HostError, match='belong together'):
        hosts.connect(*given)


def test_two_hosts_make_the_update_of_one(tmp_path):
    port = free_port()
    finish([start([str(ROOT / 'tests' / 'two_hosts.py'), str(port), str(i), str(tmp_path / f'{i}.pkl')], tmp_path) for i in range(2)])
    first, second = (pickle.loads((tmp_path / f'{i}.pkl').read_bytes()) for i in range(2))
    assert (first['count'], first['is_main'], second['is_main']) == (2, True, False)
    assert (first['share'], second['share']) == ([0, 2, 4], [1, 3])
    assert first['exchanged'] == second['exchanged'] == ['x', 'x' * 1001]
    assert first['rows_here'] == second['rows_here'] == [4]  # of the micro-batch's eight
    np.testing.assert_array_equal(first['fetched'], learner_test.make_batch()[0].advantage_B)
    alone = learner_test.update(learner_test.make_batch())
    for found in (first, second):
        assert found['metrics'] == pytest.approx(alone[1], rel=1e-4, abs=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found['params'], alone[0].params)


@pytest.mark.slow
def test_a_run_of_two_hosts_is_the_run_of_one(tmp_path):
    """CovGPO and SERO, three groups: one host plays two of them, the other one."""
    outputs = finish(start_hosts(tmp_path / 'two', tmp_path))
    assert 'of 2 hosts' in outputs[0] and 'results:' in outputs[0] and 'results:' not in outputs[1]
    finish([start([*RUN, f'--workdir={tmp_path / "one"}'], tmp_path)])
    assert_same_run(tmp_path / 'one', tmp_path / 'two')


@pytest.mark.slow
def test_a_dead_host_ends_the_run_soon_and_it_resumes(tmp_path):
    workdir = tmp_path / 'run'
    processes = start_hosts(workdir, tmp_path)
    deadline = time.monotonic() + 600
    while not (workdir / 'checkpoints' / '1').exists():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.2)
    processes[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    output = processes[0].communicate(timeout=120)[0]
    print(f'the other host ended {time.monotonic() - began:.0f} s later')
    assert processes[0].returncode != 0
    assert 'another host of this run is gone' in output or 'distributed service' in output, output[-3000:]
    outputs = finish(start_hosts(workdir, tmp_path))
    assert 'continuing' in outputs[0]
    finish([start([*RUN, f'--workdir={tmp_path / "one"}'], tmp_path)])
    assert_same_run(tmp_path / 'one', workdir)


@pytest.mark.slow
def test_hosts_that_do_not_come_are_named(tmp_path):
    process = start([*RUN, f'--workdir={tmp_path}', '--coordinator=localhost:1', '--num_processes=2', '--process_id=1',
                     '--host_timeout_s=5'], tmp_path)
    output = process.communicate(timeout=120)[0]
    assert process.returncode != 0 and ('did not find each other within 5 s' in output or 'DEADLINE_EXCEEDED' in output), output[-2000:]
