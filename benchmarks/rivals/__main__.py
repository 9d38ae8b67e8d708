from benchmarks.rivals.measure import main

main()
