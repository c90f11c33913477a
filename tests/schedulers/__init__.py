"""refitd under real service managers and schedulers, in a container: scripts/try-systemd, scripts/try-slurm."""
