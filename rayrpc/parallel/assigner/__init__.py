"""Models to devices, by gradient descent on the probabilities of their places.

``ModelAssigner`` is that of ``machin.parallel.assigner``: it assigns models to the devices of this
process.  ``ClusterModelAssigner`` does so with the devices of the workers of an RPC group.  The
files, in the order in which an assignment meets them:

1. ``model_assigner``, ``cluster_assigner``: describe models and places...
2. ``devices``: ... by the free memory and load of GPUs and CPU, in MB and from 0 to 1...
3. ``placement``: ... and solve that problem.

Invariant: ``placement`` knows no devices, only numbers of them.

Names that machin's module has can be replaced here, with effect in all files.
"""

import psutil

from rayrpc.parallel._replaceable import make_replaceable
from rayrpc.parallel.assigner.cluster_assigner import ClusterModelAssigner
from rayrpc.parallel.assigner.devices import GPUtil
from rayrpc.parallel.assigner.model_assigner import ModelAssigner, ModelSizeEstimator

__all__ = ["ClusterModelAssigner", "GPUtil", "ModelAssigner", "ModelSizeEstimator", "psutil"]

make_replaceable(__name__)
