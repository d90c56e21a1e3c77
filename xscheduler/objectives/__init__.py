"""What a plan maximises: each objective ranks candidates in closed form and settles them by simulation."""
