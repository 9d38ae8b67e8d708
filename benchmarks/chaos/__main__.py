from benchmarks.chaos.measure import main

main()
