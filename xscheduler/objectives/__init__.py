"""Find the best plan by an objective, the figure that the plan maximises.

An objective ranks candidates in closed form and verifies the best candidates by simulation.
"""
