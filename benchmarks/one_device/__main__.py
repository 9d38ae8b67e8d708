from benchmarks.one_device.measure import main

main()
