from benchmarks.emulated.measure import main

main()
