//! How the ranks of a group agree on their plans.

use std::time::Duration;

use tonic_rdma_collective::{
    Algorithm, CollectiveError, Communicator, Fusion, Launch, Number, PlanChoice, PlanTable, Reduction,
};

/// Long enough for a busy machine; only a hang takes so long.
const LIMIT: Duration = Duration::from_secs(120);

/// Connects one rank for each choice, each on a thread of its own, and returns what `run` makes of each, in
/// order.
fn group<T: Send>(
    choices: &[PlanChoice],
    run: impl Fn(Result<Communicator, CollectiveError>, &tokio::runtime::Runtime) -> T + Sync,
) -> Vec<T> {
    group_of_hosts(&vec![None; choices.len()], choices, run)
}

/// The same, for ranks that name their hosts.
fn group_of_hosts<T: Send>(
    hosts: &[Option<&str>],
    choices: &[PlanChoice],
    run: impl Fn(Result<Communicator, CollectiveError>, &tokio::runtime::Runtime) -> T + Sync,
) -> Vec<T> {
    let address = support::free_address();
    let (address, run) = (&address, &run);
    std::thread::scope(|scope| {
        let ranks = choices.iter().enumerate().map(|(rank, choice)| {
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let launch = Launch::new(rank, choices.len(), address.as_str());
                let builder = Communicator::builder()
                    .launch(match hosts[rank] {
                        Some(host) => launch.host(host),
                        None => launch,
                    })
                    .deadline(LIMIT)
                    .plans(choice.clone());
                run(runtime.block_on(builder.connect()), &runtime)
            })
        });
        let threads: Vec<_> = ranks.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn sum(communicator: &Communicator, length: usize) -> Vec<f32> {
    let mut elements = vec![communicator.rank() as f32 + 1.0; length];
    communicator.all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap();
    elements
}

/// The bits of sums at lengths from 16 B to 4 MiB. They depend on the order of the additions, so on the
/// algorithm.
fn bits(communicator: &Communicator) -> Vec<u32> {
    let element = |index: usize| {
        let mixed = (index as u32 + 1).wrapping_mul(2_654_435_761)
            ^ (communicator.rank() as u32 + 1).wrapping_mul(0x9e37_79b1);
        (f32::from(mixed as u16) - 32_000.0) / f32::from(1_u16 << (mixed >> 28))
    };
    let sums = (1..=10).flat_map(|power| {
        let mut elements: Vec<f32> = (0..1 << (2 * power)).map(element).collect();
        communicator.all_reduce(&mut elements[..], Reduction::Sum).wait().unwrap();
        elements
    });
    sums.map(f32::to_bits).collect()
}

#[test]
fn two_runs_and_survivors_get_the_same_bits() {
    let run = |choice: PlanChoice| {
        let all = std::sync::Barrier::new(3);
        let bits = |connected: Result<Communicator, CollectiveError>, _: &tokio::runtime::Runtime| {
            let communicator = connected.unwrap();
            let bits = bits(&communicator);
            all.wait();
            bits
        };
        group(&[choice.clone(), choice.clone(), choice], bits)
    };
    let first = run(PlanChoice::default());
    assert!(first.iter().all(|bits| *bits == first[0]), "ranks differ");
    assert!(first == run(PlanChoice::default()), "runs differ");
    let all = std::sync::Barrier::new(4);
    let survivors = group(&vec![PlanChoice::default(); 4], |connected, runtime| {
        let communicator = connected.unwrap();
        all.wait();
        if communicator.rank() == 3 {
            return first[0].clone();
        }
        bits(&runtime.block_on(communicator.shrink()).unwrap())
    });
    assert!(survivors.iter().all(|bits| *bits == first[0]), "survivors differ");
    for one in Algorithm::ALL {
        let fixed = PlanChoice::Fixed { algorithm: one, chunk_bytes: 256 << 10 };
        assert!(run(fixed) != first, "{one} has the same bits, so this test can't fail");
    }
}

/// Checks all operations of one type, with small whole numbers.
fn all_operations<T: Number + From<u8> + PartialEq + std::fmt::Debug>(
    communicator: &Communicator,
    reductions: &[Reduction],
) {
    let (rank, ranks) = (communicator.rank(), communicator.size());
    let value = |rank: usize, index: usize| ((index * 7 + rank * 3) % 11 * ranks) as u8;
    for length in [3, 1000, 20_003] {
        let part = communicator.part(length, rank);
        let own = || (0..length).map(|index| T::from(value(rank, index))).collect::<Vec<T>>();
        for reduction in reductions {
            let reduced = |index: usize| {
                let values = (0..ranks).map(|rank| value(rank, index));
                T::from(match reduction {
                    Reduction::Min => values.min().unwrap(),
                    Reduction::Max => values.max().unwrap(),
                    Reduction::Mean => values.sum::<u8>() / ranks as u8,
                    _ => values.sum(),
                })
            };
            let expected: Vec<T> = (0..length).map(reduced).collect();
            let mut elements = own();
            communicator.all_reduce(&mut elements[..], *reduction).wait().unwrap();
            assert_eq!(elements, expected, "{reduction}");
            let mut elements = own();
            communicator.reduce_scatter(&mut elements[..], *reduction).wait().unwrap();
            assert_eq!(elements[part.clone()], expected[part.clone()], "{reduction}");
        }
        let mut gathered = vec![T::from(0); length];
        gathered[part.clone()].copy_from_slice(&own()[part]);
        communicator.all_gather(&mut gathered[..]).wait().unwrap();
        for owner in 0..ranks {
            let part = communicator.part(length, owner);
            assert!(part.into_iter().all(|index| gathered[index] == T::from(value(owner, index))));
        }
        let mut elements = own();
        communicator.broadcast(&mut elements[..], ranks - 1).wait().unwrap();
        assert!((0..length).all(|index| elements[index] == T::from(value(ranks - 1, index))));
    }
}

#[test]
fn ranks_of_several_hosts_send_each_element_across_once() {
    const LENGTH: usize = 60_000;
    let fresh = |hosts: &[&str]| {
        let names: Vec<_> = hosts.iter().map(|host| Some(*host)).collect();
        group_of_hosts(&names, &vec![PlanChoice::Default; hosts.len()], |connected, _| {
            bits(&connected.unwrap())
        })
    };
    for hosts in [["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "a", "b"]] {
        let all = std::sync::Barrier::new(hosts.len());
        let run = |connected: Result<Communicator, CollectiveError>, runtime: &tokio::runtime::Runtime| {
            let communicator = connected.unwrap();
            assert!(communicator.plans().pinned().ends_with("hierarchical:.."), "{}", communicator.plans());
            use Reduction::{Max, Mean, Min, Sum};
            all_operations::<f32>(&communicator, &[Sum, Mean, Min, Max]);
            all_operations::<f64>(&communicator, &[Sum, Mean]);
            all_operations::<i32>(&communicator, &[Sum, Min]);
            all_operations::<u8>(&communicator, &[Sum, Max]);
            let mut fusion = Fusion::<f32>::builder(&communicator).bucket_bytes(64 << 10).build().unwrap();
            for _ in 0..2 {
                let mut step = fusion.step().unwrap();
                for layer in ["one", "two", "three"] {
                    step.put(layer, &[communicator.rank() as f32; 10_000]).unwrap();
                }
                let means = step.finish().wait().unwrap();
                assert_eq!(means.get("two"), Some(&[1.5; 10_000][..]));
            }
            drop(fusion);
            let buffer = communicator.allocate::<f32>(LENGTH).unwrap();
            let before = communicator.statistics().across_bytes;
            let _kept = communicator.all_reduce(buffer, Sum).wait().unwrap();
            let across = communicator.statistics().across_bytes - before;
            let bits_of_all = bits(&communicator);
            all.wait();
            // The last rank leaves.
            let survivors =
                (communicator.rank() < 3).then(|| bits(&runtime.block_on(communicator.shrink()).unwrap()));
            (across, bits_of_all, survivors)
        };
        let names = hosts.map(Some);
        let results = group_of_hosts(&names, &vec![PlanChoice::Default; 4], run);
        assert!(results.iter().all(|(_, bits, _)| *bits == results[0].1), "{hosts:?}: ranks differ");
        for host in ["a", "b"] {
            // Of two hosts, each sends half of the elements as sums, and half as results.
            let across: u64 =
                results.iter().zip(hosts).filter(|(_, of)| *of == host).map(|(result, _)| result.0).sum();
            assert_eq!(across, 4 * LENGTH as u64, "{hosts:?}: host {host}");
        }
        let fresh = fresh(&hosts[..3]);
        for (_, _, survivors) in &results[..3] {
            assert!(survivors.as_ref() == Some(&fresh[0]), "{hosts:?}: survivors differ");
        }
    }
}

#[test]
fn a_rank_with_another_choice_is_named_on_all_ranks() {
    let pinned = PlanChoice::Pinned("one-shot:..1KiB,ring/64KiB:..".parse().unwrap());
    let all = std::sync::Barrier::new(3);
    let errors = group(&[pinned.clone(), pinned, PlanChoice::Default], |connected, _| {
        let error = connected.err().unwrap().to_string();
        all.wait();
        error
    });
    for error in errors {
        assert!(error.contains(r#"rank 2 has the plans "default: one-shot:.."#), "{error}");
        assert!(error.contains("one-shot:..1KiB,ring/64KiB:.."), "{error}");
    }
}

#[test]
fn plans_that_the_program_sets_are_used_and_shown() {
    let fixed = PlanChoice::Fixed { algorithm: Algorithm::Ring, chunk_bytes: 64 << 10 };
    let pinned = PlanChoice::Pinned("ring/64KiB".parse().unwrap());
    // They say the same, so they may meet.
    group(&[fixed, pinned], |connected, _| {
        let communicator = connected.unwrap();
        assert_eq!(communicator.plans().choose(8), (Algorithm::Ring, 64 << 10));
        assert_eq!(communicator.plans().pinned(), "ring/64KiB:..");
        assert_eq!(sum(&communicator, 70_000), vec![3.0; 70_000]);
    });
    group(&[PlanChoice::Default, PlanChoice::Default], |connected, _| {
        let communicator = connected.unwrap();
        assert_eq!(*communicator.plans(), PlanTable::for_ranks(2));
        let text = communicator.plans().to_string();
        assert!(text.ends_with("because it is the default"), "{text}");
        assert_eq!(communicator.statistics().operations, 0, "the agreement is not in the statistics");
    });
}
