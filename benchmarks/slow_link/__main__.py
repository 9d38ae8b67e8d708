from benchmarks.slow_link.measure import main

main()
