# SPDX-License-Identifier: Apache-2.0
"""Analysis of a user's model: its structure, predictors, and arguments.

Its structure, found by tracing it and reading its jaxpr; views of it at given params;
and whether what was passed in is what it may be.
"""
