"""Layers: imports point down, environments and workers never see JAX, and jit lives at the edge."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / 'covsero_jax'
# Modules on one line may not import each other unless named; every module may import those on lines above it.
LAYERS = (
    {'trajectory', 'envs', 'wordings'},
    {'prompts', 'losses', 'reachability', 'model', 'batch', 'packing', 'groups', 'worker_process'},
    {'advantages', 'objective', 'workers', 'sharding'},
    {'coverage_controls', 'hf_files'},
    {'pretrained'},
    {'coverage', 'learner', 'sampler', 'checkpoint', 'metrics'},
    {'rollout', 'evaluate', 'oracle', 'bank'},
    {'hosts'},
)
SAME_LAYER = {('batch', 'groups'), ('batch', 'packing'), ('evaluate', 'rollout')}
WITHOUT_JAX = ('trajectory', 'workers', 'worker_process', 'prompts', 'rollout', 'evaluate', 'oracle', 'envs.alfworld', 'envs.keydoor',
               'wordings', 'envs.webshop.env', 'envs.sokoban',
               'envs.alfworld_games', 'envs.alfworld_explorer', 'envs.alfworld_textworld')
FILES = sorted(PACKAGE.glob('**/*.py'))


def layer(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if module in names)


def imported(path: pathlib.Path) -> set[str]:
    """Top-level modules of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split('.')[0] == 'covsero_jax':
            parts = node.module.split('.')
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {alias.name.split('.')[1] for alias in node.names if alias.name.startswith('covsero_jax.')}
    return found


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_imports_point_down(path):
    module = path.relative_to(PACKAGE).parts[0].removesuffix('.py')
    if module == '__init__':
        assert imported(path) == set()
        return
    for other in imported(path) - {module}:
        assert layer(other) < layer(module) or (module, other) in SAME_LAYER, f'{module} imports {other}'


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_jit_and_configuration_stay_at_the_edge(path):
    module, text = path.stem, path.read_text()
    # sharding and pretrained make arrays where they belong; coverage has it in a docstring
    assert 'jax.jit' not in text or module in ('sampler', 'learner', 'sharding', 'pretrained', 'hosts', 'coverage')
    assert 'ml_collections' not in text and 'experiments' not in imported(path)


def test_environments_and_workers_do_not_import_jax():
    code = ';'.join(f'import covsero_jax.{name}' for name in WITHOUT_JAX)
    code += ";import sys;print([m for m in ('jax', 'flax', 'transformers', 'textworld') if m in sys.modules])"
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    assert run.stdout.strip() == '[]'
