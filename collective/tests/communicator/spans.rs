//! The spans of operations.

use support::{Log, Runtime, config, free_address, is_alone};
use tonic_rdma_collective::{CollectiveError, Communicator, Launch, Reduction};

#[test]
fn each_operation_is_a_span() {
    // It reads the log of all threads.
    if !is_alone(concat!(module_path!(), "::each_operation_is_a_span")) {
        return;
    }
    let log = Log::of_process();
    Runtime::MultiThread.run(async {
        let address = free_address();
        let rank = async |rank: usize| {
            let builder = Communicator::builder().launch(Launch::new(rank, 2, &address)).config(config());
            let communicator = builder.connect().await?;
            // Of the short path, and of a plan.
            communicator.all_reduce(&mut [1.0_f32; 3][..], Reduction::Sum).await?;
            communicator.all_reduce(&mut vec![1_i64; 100_000][..], Reduction::Max).await?;
            communicator.broadcast(&mut [rank as u8; 77][..], 1).await?;
            if rank == 0 {
                communicator.send(1, &[7_u16; 9][..]).await?;
            } else {
                communicator.recv(0, &mut [0_u16; 9][..]).await?;
            }
            communicator.barrier().await?;
            if rank == 0 {
                // An operation on slices that is dropped ends the group.
                drop(communicator.all_reduce(&mut [1_u32; 5000][..], Reduction::Sum).start());
            } else {
                communicator.all_reduce(&mut [1_u32; 5000][..], Reduction::Sum).await.unwrap_err();
            }
            Ok::<_, CollectiveError>(())
        };
        tokio::try_join!(rank(0), rank(1)).unwrap();
        log.has(2, "a collective operation has failed").await;
        let lines = |operation: &str, event: &str| {
            let span = format!("collective{{operation=\"{operation}\"");
            let lines = log.lines(&span).into_iter().filter(|line| line.contains(event));
            lines
                .map(|line| line[line.find(&span).unwrap()..].split(':').next().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        for (operation, fields, count) in [
            ("all_reduce", "ranks=2 bytes=12 dtype=float32", 2),
            ("all_reduce", "ranks=2 bytes=800000 dtype=int64", 2),
            ("all_reduce", "ranks=2 bytes=20000 dtype=uint32", 2),
            ("broadcast", "ranks=2 bytes=77 dtype=uint8", 2),
            ("send", "ranks=2 bytes=18 dtype=uint16", 1),
            ("receive", "ranks=2 bytes=18 dtype=uint16", 1),
        ] {
            for event in [": new", ": close"] {
                let found = lines(operation, event).into_iter().filter(|line| line.contains(fields));
                let found: Vec<_> = found.collect();
                assert_eq!(found.len(), count, "{operation} {fields}{event}:\n{}", log.text());
                let planned = !["send", "receive"].contains(&operation);
                assert!(found.iter().all(|line| line.contains("algorithm=") == planned), "{found:?}");
            }
        }
        assert!(lines("barrier", ": close").len() >= 2, "{}", log.text());
    });
}
