# SPDX-License-Identifier: Apache-2.0
"""Data with many labels per row: reading files, and drawing rows and labels.

Everything except :meth:`ClassMembers.draw` runs on the host, in NumPy and SciPy. Inputs
and labels stay sparse: :class:`numpyro_gpaug.inducing.Subspace` makes a minibatch of
inputs dense, :class:`LabelSampler` draws the labels that a step uses, and
:mod:`numpyro_gpaug.multilabel.ranking` evaluates the predictions.
"""

from ._classes import ClassBatch, ClassMembers
from ._files import MultiLabelData, load_npz, load_svmlight, load_xmc
from ._sampling import LabelBatch, LabelSampler, prefetch

__all__ = [
    "ClassBatch",
    "ClassMembers",
    "LabelBatch",
    "LabelSampler",
    "MultiLabelData",
    "load_npz",
    "load_svmlight",
    "load_xmc",
    "prefetch",
]
