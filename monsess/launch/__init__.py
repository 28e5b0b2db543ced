"""Starting the processes of a job: `monsess.launch.local` on one machine."""
