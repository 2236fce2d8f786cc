"""CovGPO on GiGPO, ALFWorld: all-failed groups are ranked by first-visit coverage, all others are left as they are.

python -m experiments.train --config=configs/alfworld_covgpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_covgpo.py:1.5b     2 x H100 or v5p-8; the paper: 92.2 %, GiGPO alone 86.7 %
python -m experiments.train --config=configs/alfworld_covgpo.py --config.advantage.estimator=hgpo     on another base
python -m experiments.train --config=configs/alfworld_covgpo.py --config.coverage.variant=shuffle     a control
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_covgpo'
    config.advantage.estimator = 'gigpo'
    config.coverage.variant = 'covgpo'
    config.coverage.mode = 'deployed'  # as the paper trained; 'ideal' is its theory
    return config
