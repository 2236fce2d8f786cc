"""Worker processes: the same observations as in this process, whatever happens to them."""

import functools
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import scripted

from covsero_jax import workers
from covsero_jax.envs import base, keydoor

COMMANDS = ('look', 'go east', 'xyzzy', 'look')
FAULTS = {
    'die': 'killed by SIGKILL',
    'die_with_child': 'killed by SIGKILL',
    'hang': 'time limit',
    'crash': 'divides by zero',
    'leave': 'had enough',
}


def play(pool: workers.WorkerPool) -> list[list[base.Observation | None]]:
    """Four steps in all slots but the last; slot i plays task i mod 6."""
    slots = pool.num_envs - 1
    seen = [pool.reset([slot % 6 for slot in range(slots)] + [None])]
    for command in COMMANDS:
        seen.append(pool.step([command] * slots + [None]))
    return seen


@functools.cache
def undisturbed(num_envs: int) -> list[list[base.Observation | None]]:
    with workers.WorkerPool(keydoor.KeyDoorEnv, num_envs=num_envs, num_workers=0, timeout_s=60) as pool:
        return play(pool)


def running(pid: int) -> bool:
    """Neither ended nor a zombie."""
    try:
        return pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')')[1].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def pids(folder: pathlib.Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def test_slots_hold_independent_episodes():
    seen = undisturbed(8)
    env = keydoor.KeyDoorEnv()
    for slot in range(7):
        assert seen[0][slot] == env.reset(slot % 6)
        assert [row[slot] for row in seen[1:]] == [env.step(command) for command in COMMANDS]
    assert all(row[7] is None for row in seen)


@pytest.mark.parametrize('num_workers', [1, 3, 20])
def test_any_number_of_workers_gives_the_same(num_workers):
    with workers.WorkerPool(keydoor.KeyDoorEnv, num_envs=8, num_workers=num_workers, timeout_s=60) as pool:
        assert pool.task_names == keydoor.KeyDoorEnv.task_names
        assert pool.task_types == keydoor.KeyDoorEnv.task_types
        assert play(pool) == undisturbed(8)
        assert play(pool) == undisturbed(8)  # and again, over the old episodes


@pytest.mark.parametrize(
    ('num_workers', 'fault'),
    [(2, 'die'), (2, 'die_with_child'), (2, 'hang'), (2, 'crash'), (2, 'leave'), (0, 'crash'), (0, 'leave')],
)
def test_a_failed_worker_continues_at_the_same_point(num_workers, fault, tmp_path, caplog):
    flag = tmp_path / 'flag'
    flag.write_text('passage/long')
    make_env = functools.partial(scripted.Faulty, getattr(scripted, fault), flag)
    timeout_s = 2 if fault in ('hang', 'die_with_child') else 60
    with workers.WorkerPool(make_env, num_envs=8, num_workers=num_workers, timeout_s=timeout_s) as pool:
        assert play(pool) == undisturbed(8)
    assert not flag.exists()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert 'step of task passage/long' in warnings[0]
    assert FAULTS[fault] in warnings[0]


def test_a_worker_killed_between_two_calls_is_brought_back(tmp_path, caplog):
    make_env = functools.partial(scripted.Reporter, tmp_path)
    with workers.WorkerPool(make_env, num_envs=4, num_workers=2, timeout_s=60) as pool:
        pool.reset([0, 1, 2, None])
        before = pool.step(['look'] * 3 + [None])
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGKILL)
        assert pool.step(['look'] * 3 + [None]) == before
        assert len(pids(tmp_path)) == 4  # two dead ones and their successors
    assert caplog.text.count('killed by SIGKILL') == 2


@pytest.mark.parametrize('num_workers', [0, 1])
def test_a_fault_that_stays_is_reported_with_task_and_traceback(num_workers, tmp_path, caplog):
    flag = tmp_path / 'flag'
    flag.write_text('passage/short')
    make_env = functools.partial(scripted.Faulty, scripted.crash, flag, always=True)
    with workers.WorkerPool(make_env, num_envs=6, num_workers=num_workers, timeout_s=60, max_restarts=2) as pool:
        with pytest.raises(workers.WorkerError, match='passage/short') as caught:
            pool.reset([3, None, None, 2, None, None])
            for _ in range(3):
                pool.step(['look', None, None, 'look', None, None])
        assert 'divides by zero' in str(caught.value)
        assert 'in crash' in str(caught.value)  # the child's traceback, down to the guilty line
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == 2
        flag.unlink()
        assert pool.step(['look', None, None, 'look', None, None])[0].text.startswith('You are in room 0.')


def test_replay_that_differs_is_an_error(tmp_path):
    make_env = functools.partial(scripted.Reporter, tmp_path)
    with workers.WorkerPool(make_env, num_envs=1, num_workers=1, timeout_s=60) as pool:
        pool.reset([1])  # the observation holds the process id
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        with pytest.raises(workers.WorkerError, match='one_door/near is not deterministic'):
            pool.step(['look'])
        assert pool.reset([1])[0].task == keydoor.TASK  # a new episode does not need the old one


def test_an_interrupted_step_is_not_half_done(tmp_path, caplog, request):
    flag = tmp_path / 'flag'
    flag.write_text('passage/long')
    make_env = functools.partial(scripted.Faulty, scripted.hang, flag)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins with it ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    with workers.WorkerPool(make_env, num_envs=8, num_workers=2, timeout_s=60) as pool:
        pool.reset([slot % 6 for slot in range(7)] + [None])
        for command in COMMANDS[:2]:
            pool.step([command] * 7 + [None])
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # Ctrl-C while the third step hangs
        with pytest.raises(KeyboardInterrupt):
            pool.step([COMMANDS[2]] * 7 + [None])
        assert pool.step([COMMANDS[2]] * 7 + [None]) == undisturbed(8)[3]
    assert caplog.text.count('previous call was interrupted') == 2


def broken_env():
    raise FileNotFoundError('no games in this folder')


def tuple_env():
    env = keydoor.KeyDoorEnv()
    env.reset = lambda task_id: ('text', 0.0, False)
    return env


@pytest.mark.parametrize('num_workers', [0, 2])
def test_make_env_error_surfaces(num_workers):
    with pytest.raises(workers.WorkerError, match='(?s)make_env failed.*in broken_env.*no games in this folder'):
        workers.WorkerPool(broken_env, num_envs=4, num_workers=num_workers, timeout_s=60)


def test_make_env_must_be_importable():
    with pytest.raises(ValueError, match='num_workers=0'):
        workers.WorkerPool(lambda: keydoor.KeyDoorEnv(), num_envs=1, num_workers=1, timeout_s=60)


def test_an_env_that_returns_something_else_is_named():
    pool = workers.WorkerPool(tuple_env, num_envs=1, num_workers=0, timeout_s=60)
    with pytest.raises(workers.WorkerError, match='reset must return an Observation, got tuple'):
        pool.reset([0])


def test_wrong_calls_are_errors():
    with workers.WorkerPool(keydoor.KeyDoorEnv, num_envs=2, num_workers=0, timeout_s=60) as pool:
        with pytest.raises(ValueError, match='no episode'):
            pool.step(['look', None])
        with pytest.raises(ValueError, match='outside 0..5'):
            pool.reset([-1, None])
        with pytest.raises(ValueError, match='one entry per slot'):
            pool.reset([0])
        pool.reset([0, 1])
        pool.step(['climb out of the window', None])
        with pytest.raises(ValueError, match='slot 0 .task one_door/far. is over'):
            pool.step(['look', 'look'])
    with pytest.raises(ValueError, match='closed'):
        pool.reset([0, 1])


@pytest.mark.parametrize('num_workers', [0, 1])
def test_oracle_only_where_it_was_built(num_workers):
    make_env = functools.partial(keydoor.KeyDoorEnv, oracle=True)
    with workers.WorkerPool(make_env, num_envs=2, num_workers=num_workers, timeout_s=60) as pool:
        pool.reset([3, 1])
        assert pool.oracle_commands([1, 0]) == ['take red key', 'go east']
    with workers.WorkerPool(keydoor.KeyDoorEnv, num_envs=2, num_workers=num_workers, timeout_s=60) as pool:
        pool.reset([3, 1])
        with pytest.raises(base.OracleForbidden):
            pool.oracle_commands([0])
        assert pool.step(['go east', None])[0].text == 'You are in room 1. You hold: nothing.'


def test_workers_are_clean_processes_and_leave_none_behind(tmp_path):
    import jax  # noqa: F401  (the parent has it, the workers must not)

    make_env = functools.partial(scripted.Reporter, tmp_path)
    with workers.WorkerPool(make_env, num_envs=4, num_workers=2, timeout_s=60) as pool:
        reports = [json.loads(observation.text) for observation in pool.reset([0, 0, 0, 0])]
    for report in reports:
        assert report.pop('pid') != os.getpid()
        assert report == {'jax': False, 'platforms': 'cpu', 'devices': '', 'ignores_interrupt': True}
    assert len(pids(tmp_path)) == 2
    assert not any(map(running, pids(tmp_path)))


def test_a_script_needs_no_guard_and_workers_end_with_it(tmp_path):
    """The script has JAX at its top, no `__main__` guard, and dies without closing the pool."""
    folder = tmp_path / 'pids'
    folder.mkdir()
    script = tmp_path / 'script.py'
    script.write_text(
        'import functools, os, pathlib, sys\n'
        'import jax\n'
        f'sys.path[:0] = {[str(pathlib.Path(__file__).parent), str(pathlib.Path(workers.__file__).parents[1])]!r}\n'
        'import scripted\n'
        'from covsero_jax import workers\n'
        f'make_env = functools.partial(scripted.Reporter, pathlib.Path({str(folder)!r}))\n'
        'pool = workers.WorkerPool(make_env, num_envs=2, num_workers=2, timeout_s=60)\n'
        'print(pool.reset([0, 0])[0].text, flush=True)\n'
        'os.kill(os.getpid(), 9)\n'
    )
    result = subprocess.run([sys.executable, script], check=False, stdout=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == -signal.SIGKILL
    assert not json.loads(result.stdout)['jax']
    deadline = time.monotonic() + 20
    while any(map(running, pids(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids(folder)) == 2
    assert not any(map(running, pids(folder)))
