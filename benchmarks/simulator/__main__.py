from benchmarks.simulator.measure import main

main()
