"""What a checkout is for beside the package: experiments (`python -m scripts.measure`), training, checks."""
