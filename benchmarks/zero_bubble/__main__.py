from benchmarks.zero_bubble.measure import main

main()
