"""Checks what a run needs and says it in one line per finding; the exit code is 1 when something is wrong.

python -m experiments.doctor                 versions, devices, disk, the embedded environments and policies, and real data
                                             where the variables ALFWORLD_DATA and WEBSHOP_DATA name some
python -m experiments.doctor --data=FOLDER   also this folder of ALFWorld games
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence

PYTHON = (3, 11)
PACKAGES = {  # the lower bounds of setup.py; '' = any version
    'jax': '0.6', 'flax': '0.10', 'optax': '0.2.4', 'orbax-checkpoint': '0.11', 'transformers': '4.50',
    'ml-collections': '', 'absl-py': '', 'chex': '', 'numpy': '', 'tqdm': '', 'safetensors': '', 'tensorboardX': '',
    'matplotlib': '', 'jinja2': '', 'pillow': '', 'PyStemmer': '', 'rapidfuzz': '',
}
OFFICIAL_ENGINE = {'alfworld': '0.4.2', 'textworld': '1.7.0'}  # the versions that the native engine was compared with
OFFICIAL_COUNTS = {'train': 3553, 'valid_seen': 140, 'valid_unseen': 134}
EMBEDDED_GAMES = 6  # per split: one of each task type
PROBED_GAMES = 20  # per split: loaded and played
TINY_POLICIES = ('tiny', 'tiny_webshop', 'tiny_sokoban')
TINY_FILES = ('config.json', 'tokenizer.json', 'model.safetensors')
MIN_FREE_GIB = 1.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. level: 'ok' | 'note' (works, but know it) | 'wrong' (makes the exit code 1)."""

    level: str
    text: str


def check_versions() -> Iterator[Finding]:
    """Python and every required package: missing and too old ones are named with the command that mends them."""
    running = '.'.join(map(str, sys.version_info[:3]))
    wanted = '.'.join(map(str, PYTHON))
    yield (Finding('ok', f'python {running}') if sys.version_info[:2] >= PYTHON
           else Finding('wrong', f'python {running} is too old; {wanted} or newer is needed'))
    for package, minimum in PACKAGES.items():
        version = _version(package)
        if version is None:
            yield Finding('wrong', f"{package} is not installed; run  pip install -e .")
        elif _numbers(version) < _numbers(minimum):
            yield Finding('wrong', f"{package} {version} is too old; run  pip install -U '{package}>={minimum}'")
        else:
            yield Finding('ok', f'{package} {version}')


def check_devices() -> Iterator[Finding]:
    """What JAX computes on."""
    try:
        import jax  # imported here, so that every other finding is there when JAX is broken

        devices = jax.devices()
    except Exception as error:  # noqa: BLE001 - a broken installation or driver can raise anything
        yield Finding('wrong', f'jax finds no device: {error!r}')
        return
    platform, kind = devices[0].platform, devices[0].device_kind
    yield Finding('ok', f'{len(devices)} device(s): {platform} ({kind})')
    if platform == 'cpu' and shutil.which('nvidia-smi'):
        yield Finding('note', "an NVIDIA GPU seems to be here, but JAX uses the CPU; run  pip install -U 'jax[cuda12]'")


def check_disk(folders: Sequence[pathlib.Path]) -> Iterator[Finding]:
    """Free space where runs and caches are written."""
    for folder in folders:
        place = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(place).free / 2**30
        if not os.access(place, os.W_OK):
            yield Finding('wrong', f'{folder} cannot be written; set COVSERO_CACHE, or change the folder')
        elif free < MIN_FREE_GIB:
            yield Finding('wrong', f'{folder}: {free:.1f} GiB free, at least {MIN_FREE_GIB:.0f} GiB is needed')
        else:
            yield Finding('ok', f'{folder}: {free:.1f} GiB free')


def check_games(folder: pathlib.Path | str, counts: dict[str, int]) -> Iterator[Finding]:
    """Every split of `counts` (split -> expected number of games): counted, and a sample is played."""
    from covsero_jax.envs import alfworld_data

    for split, count in counts.items():
        try:
            games = alfworld_data.find_games(folder, split)
            problem = probe(games)
        except ValueError as error:  # AlfworldDataError, GameError
            yield Finding('wrong', str(error))
            continue
        place = games.folder / alfworld_data.LAYOUT / split
        skipped = ''.join(f', {n} {reason} left out' for reason, n in sorted(games.skipped.items()))
        yield Finding('ok', f'{place}: {len(games)} games{skipped}, manifest {games.hash}')
        if problem:
            yield Finding('wrong', f'{place}: {problem}')
        if len(games) != count:
            yield Finding('note', f'{place}: {count} games were expected; results are not comparable with others')


def probe(games) -> str | None:
    """Play up to PROBED_GAMES games; returns what is wrong with the data, or None.

    The first admissible command must do something, and the recorded walkthrough must win: both fail for data of another
    version than the engine's.
    """
    from covsero_jax.envs import alfworld_engine

    sample = games.subset(PROBED_GAMES)
    for i, name in enumerate(sample.names):
        state = sample.game(i).initial_state()
        commands = json.loads(sample.path(i).read_text(encoding='utf-8')).get('walkthrough') or ()
        first = state.admissible()[0]
        if state.copy().step(first) == alfworld_engine.NOTHING_HAPPENS:
            return f'{name}: {first!r} does nothing; the data is of another version, alfworld >= 0.4 is needed'
        for command in commands:
            if state.step(command) == alfworld_engine.NOTHING_HAPPENS:
                return f'{name}: {command!r} of the walkthrough does nothing; the data is of another version, ' \
                       'alfworld >= 0.4 is needed'
        if commands and not state.won():
            return f'{name}: the walkthrough does not win; download the data again'
    return None


def check_real_games() -> Iterator[Finding]:
    """The folder that the variable ALFWORLD_DATA names."""
    folder = os.environ.get('ALFWORLD_DATA')
    if folder:
        yield from check_games(folder, OFFICIAL_COUNTS)
    else:
        yield Finding('ok', 'ALFWORLD_DATA is not set: the embedded games are played, not the real ones')


def check_embedded_games() -> Iterator[Finding]:
    """A few games of the embedded generator, written to the cache folder as a run writes its own."""
    from covsero_jax.envs import alfworld_games, cache

    games = cache.folder() / 'games'
    try:
        folder = alfworld_games.ensure_games(games, difficulty=alfworld_games.DIFFICULTIES['tiny'], seed=0,
                                             num_games=dict.fromkeys(OFFICIAL_COUNTS, EMBEDDED_GAMES))
    except OSError as error:
        yield Finding('wrong', f'the embedded games cannot be written to {games}: {error}; set COVSERO_CACHE')
        return
    yield from check_games(folder, dict.fromkeys(OFFICIAL_COUNTS, EMBEDDED_GAMES))


def check_webshop() -> Iterator[Finding]:
    """The embedded catalogue and, where the variable WEBSHOP_DATA names one, the real one: the oracle buys what is wanted."""
    from covsero_jax.envs.webshop import env

    sources = {'embedded WebShop catalogue': 'generated'}
    if os.environ.get('WEBSHOP_DATA'):
        sources[f'WEBSHOP_DATA={os.environ["WEBSHOP_DATA"]}'] = os.environ['WEBSHOP_DATA']
    for title, data in sources.items():
        try:
            splits = {split: env.make_env(data, split, oracle=True, drop_unattainable=True)
                      for split in ('train', 'valid', 'test')}
        except (ValueError, OSError) as error:  # WebshopDataError
            yield Finding('wrong', f'{title}: {error}')
            continue
        counts = ', '.join(f'{split} {len(shop.task_names)}' for split, shop in splits.items())
        yield Finding('ok', f'{title}: attainable goals {counts}')
        yield from _oracle_findings(title, splits['test'])
    if len(sources) == 1:
        yield Finding('ok', 'WEBSHOP_DATA is not set: the embedded catalogue is sold, not the real one')


def check_sokoban() -> Iterator[Finding]:
    """A few generated levels."""
    from covsero_jax.envs import sokoban

    levels = sokoban.make_env('test', num_levels=PROBED_GAMES, oracle=True, max_steps=30)
    yield Finding('ok', f'Sokoban: {len(levels.task_names)} levels generated')
    yield from _oracle_findings('Sokoban', levels)


def _oracle_findings(title: str, env) -> Iterator[Finding]:
    """Plays up to PROBED_GAMES evenly spaced tasks by the oracle."""
    from covsero_jax.envs import base

    chosen = base.evenly_spaced(range(len(env.task_names)), PROBED_GAMES)
    for task_id in chosen:
        observation = env.reset(task_id)
        while not observation.done:
            command = env.oracle_command()
            if command is None:
                break
            observation = env.step(command)
        if not observation.success:
            yield Finding('wrong', f'{title}: the oracle does not solve {env.task_names[task_id]}')
            return
    yield Finding('ok', f'{title}: the oracle solves {len(chosen)} of {len(chosen)} tasks')


def check_tiny_policy(folder: pathlib.Path) -> Iterator[Finding]:
    """The Hugging Face folder of the tiny policy."""
    missing = [name for name in TINY_FILES if not (folder / name).is_file()]
    if missing:
        lacking = ', '.join(missing)
        yield Finding('wrong', f'tiny policy: {folder} lacks {lacking}; run  python -m experiments.make_tiny')
        return
    import safetensors

    try:
        architecture = json.loads((folder / 'config.json').read_text(encoding='utf-8'))['architectures'][0]
        with safetensors.safe_open(folder / 'model.safetensors', framework='numpy') as file:
            num_tensors = len(list(file.keys()))
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, IndexError) as error:
        yield Finding('wrong', f'tiny policy: a file of {folder} is damaged ({error!r}); restore it, git checkout')
        return
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    yield Finding('ok', f'tiny policy {folder.name}: {architecture}, {num_tensors} tensors, {size:.1f} MiB')


def check_official_engine() -> Iterator[Finding]:
    """The optional official engine; the native one plays the same games."""
    versions = {package: _version(package) for package in OFFICIAL_ENGINE}
    if None in versions.values():
        yield Finding('ok', "official ALFWorld engine: not installed (optional; pip install -e '.[alfworld]')")
        return
    found = ', '.join(f'{package} {version}' for package, version in versions.items())
    tested = ', '.join(f'{package} {version}' for package, version in OFFICIAL_ENGINE.items())
    yield (Finding('ok', f'official ALFWorld engine: {found}') if versions == OFFICIAL_ENGINE else
           Finding('note', f'official ALFWorld engine: {found}; compared with the native one was {tested}'))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """'0.10.2rc1' -> (0, 10, 2): enough to compare with the bounds above."""
    return tuple(int(n) for n in re.findall(r'\d+', version)[:3])


def report(checks: Sequence[Callable[[], Iterator[Finding]]]) -> int:
    """Print the findings; returns the exit code."""
    wrong = 0
    for check in checks:
        try:
            for finding in check():
                print(f'{finding.level:>5}  {finding.text}', flush=True)
                wrong += finding.level == 'wrong'
        except ImportError as error:
            print(f'wrong  {check.__name__}: {error}; run  pip install -e .', flush=True)
            wrong += 1
    print(f'\n{wrong} thing(s) wrong' if wrong else '\nnothing wrong')
    return 1 if wrong else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', help='a folder of ALFWorld games (it contains json_2.1.1)')
    folder = parser.parse_args(arguments).data

    from covsero_jax.envs import alfworld_data, cache

    def check_data() -> Iterator[Finding]:
        return check_games(folder, OFFICIAL_COUNTS) if folder else iter(())

    def check_writable() -> Iterator[Finding]:
        return check_disk((pathlib.Path.cwd(), cache.folder()))

    def check_tiny() -> Iterator[Finding]:
        assets = pathlib.Path(alfworld_data.__file__).parents[1] / 'assets'
        for name in TINY_POLICIES:
            yield from check_tiny_policy(assets / name)

    return report((check_versions, check_devices, check_writable, check_embedded_games, check_webshop, check_sokoban,
                   check_tiny, check_real_games, check_data, check_official_engine))


if __name__ == '__main__':
    sys.exit(main())
