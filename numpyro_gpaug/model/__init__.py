# SPDX-License-Identifier: Apache-2.0
"""Analysis of a user's model: its structure, predictors, and arguments.

The structure comes from tracing the model and reading its jaxpr. Views show the model
at given params. Checks validate the arguments.
"""
