from benchmarks.solver.measure import main

main()
