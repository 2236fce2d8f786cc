"""Installation: `pip install -e .` needs no compiler, no torch and no Java."""

from setuptools import find_packages, setup

setup(
    name='covsero_jax',
    version='0.1.0',
    description='CovGPO and SERO: group-based RL for LLM agents on long text tasks, in JAX',
    python_requires='>=3.11',
    packages=find_packages(include=['covsero_jax', 'covsero_jax.*']),
    package_data={'covsero_jax': ['assets/**/*', 'envs/data/*']},
    install_requires=[
        'jax>=0.6', 'flax>=0.10', 'optax>=0.2.4', 'orbax-checkpoint>=0.11', 'transformers>=4.50',
        'ml-collections', 'absl-py', 'chex', 'numpy', 'tqdm', 'safetensors', 'tensorboardX', 'matplotlib', 'jinja2', 'pillow',
        'PyStemmer', 'rapidfuzz',
    ],
    extras_require={
        'test': ['pytest', 'pytest-xdist', 'hypothesis'],
        # The TPU compiler, which runs without a TPU: experiments.plan. Linux on x86-64.
        'plan': ['jax[tpu]'],
        # Exact title nouns of real WebShop products, only for importing them: also  python -m spacy download en_core_web_sm
        'webshop': ['spacy>=3.8'],
        # The official engine. It compiles a planner and an interpreter: minutes, and a C++ compiler.
        'alfworld': ['alfworld==0.4.2', 'textworld[pddl]==1.7.0'],
    },
)
