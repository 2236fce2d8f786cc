"""The Colab notebook runs from top to bottom, downloads nothing, and leaves the installed JAX alone."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOK = ROOT / 'notebooks' / 'quickstart_tpu.ipynb'


def cells(kind: str = 'code') -> list[str]:
    return [''.join(cell['source']) for cell in json.loads(NOTEBOOK.read_text())['cells'] if cell['cell_type'] == kind]


def test_it_is_a_clean_notebook():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook['nbformat'], notebook['nbformat_minor']) == (4, 5)
    ids = [cell['id'] for cell in notebook['cells']]
    assert len(set(ids)) == len(ids)
    for cell in notebook['cells']:
        assert isinstance(cell['metadata'], dict) and cell['source']
        if cell['cell_type'] == 'code':
            assert cell['outputs'] == [] and cell['execution_count'] is None
            compile(''.join(cell['source']), cell['id'], 'exec')


def test_installing_pins_what_is_there():
    """The one pip command has the present versions of jax and libtpu as constraints, and nothing asks for an upgrade."""
    source = '\n'.join(cells())
    pip = [line for line in source.splitlines() if 'pip install' in line]
    assert len(pip) == 1 and '--constraint' in pip[0] and '-e .' in pip[0]
    for word in ('--upgrade', ' -U', 'jax[', 'libtpu-nightly'):
        assert word not in source


def run_cells(tmp_path: pathlib.Path, parameters: str, number: int) -> subprocess.CompletedProcess:
    """The first `number` code cells in one namespace, the parameter cell followed by `parameters`."""
    first, *others = cells()
    script = tmp_path / 'notebook.py'
    script.write_text('\n'.join([first, parameters, *others][: number + 1]))
    environment = os.environ | {
        'MPLBACKEND': 'Agg', 'JAX_PLATFORMS': 'cpu', 'COVSERO_CACHE': str(tmp_path / 'cache'), 'PYTHONPATH': str(ROOT)}
    return subprocess.run([sys.executable, str(script)], cwd=NOTEBOOK.parent, env=environment, capture_output=True, text=True)


def test_it_runs_from_top_to_bottom(tmp_path):
    done = run_cells(tmp_path, f'PRESET, WORKDIR = "smoke", {str(tmp_path / "run")!r}', len(cells()))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert 'everything that is needed is installed' in done.stdout and 'Successfully installed' not in done.stdout
    assert 'No accelerator' in done.stdout and 'the whole report' in done.stdout and 'advantage' in done.stdout
    assert (tmp_path / 'run' / 'report.html').is_file()


def test_without_a_checkout_it_says_what_to_set(tmp_path):
    script = tmp_path / 'notebook.py'
    script.write_text('\n'.join(cells()[:2]))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and 'Set REPOSITORY above' in done.stderr
