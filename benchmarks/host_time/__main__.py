from benchmarks.host_time.measure import main

main()
