"""Numbers of the mechanism where nobody says otherwise."""

HEADROOM = 5.0
"""``k``: how much a record's norm may have grown since it was last seen."""

A_E = 0.8
"""``a_E``: the share of epochs that reserve as if kappa were 1."""
