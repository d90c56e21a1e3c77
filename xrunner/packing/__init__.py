"""Matrix products on CPUs with weights that are packed once. base.py has the contract, choice.py the layouts."""
