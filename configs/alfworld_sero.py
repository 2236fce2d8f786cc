"""SERO, ALFWorld: from states that failed rollouts reached, a training-only oracle finishes the task; its commands are
learned, each weighted by how reachable it is for the policy.

python -m experiments.train --config=configs/alfworld_sero.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_sero.py:1.5b     2 x H100 or v5p-8; the paper: 95.8 % seen, 91.7 % unseen
python -m experiments.train --config=configs/alfworld_sero.py --config.advantage.estimator=hgpo      the paper's other base
python -m experiments.train --config=configs/alfworld_sero.py --config.sero.variant=root_only        a control
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_sero'
    config.advantage.estimator = 'graphgpo'
    config.env.observation = 'enriched_state'  # GraphGPO needs to tell states apart, see alfworld_graphgpo.py; prompts are the raw texts
    config.sero.variant = 'sero'
    return config
