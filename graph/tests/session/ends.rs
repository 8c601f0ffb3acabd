//! Ends of parts: in good order, by a failure, and by a kill. And parts that do not fit together.

use std::net::TcpListener;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use tonic_rdma::Provider;
use tonic_rdma_graph::placement::Part;
use tonic_rdma_graph::schedule::ReceiveMode;
use tonic_rdma_graph::session::{Fingerprint, Listener, Session};
use tonic_rdma_graph::transfer::TransferMode;
use tonic_rdma_graph::{GraphError, GraphErrorKind};

use crate::chain::{Chain, Checks, HANGS, after_connects, bind, chain_of, config, listeners, peering, run};
use crate::child::Child;

const ENDLESS: u64 = u64::MAX;

/// Connects part 0 of this process to children that have the other parts.
fn with_children(
    parts: usize,
    mode: TransferMode,
    window: usize,
    steps: u64,
) -> (Arc<Chain>, Session, Vec<Child>) {
    let chain = Arc::new(Chain::new(parts));
    let listener = bind("127.0.0.1:0", config()).unwrap();
    let mut children: Vec<Child> =
        (1..parts).map(|part| Child::start(part, parts, mode, window, steps)).collect();
    let mut addresses = vec![listener.address().to_string()];
    addresses.extend(children.iter().map(|child| child.address.clone()));
    children.iter_mut().for_each(|child| child.connect(&addresses));
    let session = listener.connect(peering(&chain, 0, &addresses, &[mode], window)).unwrap();
    (chain, session, children)
}

#[test]
fn processes_run_in_each_mode_and_leave() {
    for mode in TransferMode::ALL {
        let (chain, session, children) = with_children(3, mode, 2, 5);
        let transfers = session.transfers(mode).unwrap();
        let mut executor = chain.executor(session.part(), transfers, 2, ReceiveMode::PollingAsync);
        run(&mut executor, 0..5, &mut Checks::of(&chain)).unwrap();
        drop(executor);
        session.leave(HANGS);
        children.into_iter().for_each(Child::ends);
    }
}

#[test]
fn a_killed_part_is_named_by_all_others_in_each_mode() {
    for (mode, receive) in TransferMode::ALL
        .into_iter()
        .zip([ReceiveMode::PollingAsync, ReceiveMode::Callback].into_iter().cycle())
    {
        let chain = Arc::new(Chain::new(3));
        let (listeners, mut addresses) = listeners(2);
        let mut child = Child::start(2, 3, mode, 2, ENDLESS);
        addresses.push(child.address.clone());
        child.connect(&addresses);
        let (fed, steps) = mpsc::channel();
        let ends: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(part, listener)| {
                let (chain, addresses, fed) = (Arc::clone(&chain), addresses.clone(), fed.clone());
                thread::spawn(move || {
                    let session = listener.connect(peering(&chain, part, &addresses, &[mode], 2)).unwrap();
                    let transfers = session.transfers(mode).unwrap();
                    let mut executor = chain.executor(session.part(), transfers, 2, receive);
                    let mut program = Checks { fed: Some(fed), ..Checks::of(&chain) };
                    run(&mut executor, 0..ENDLESS, &mut program).unwrap_err()
                })
            })
            .collect();
        while steps.recv_timeout(HANGS).unwrap() < 5 {}
        child.process.kill().unwrap();
        let killed = Instant::now();
        for end in ends {
            let error = end.join().unwrap();
            let text = chain_of(&error);
            let named = match error.kind() {
                GraphErrorKind::PeerLost => error.peer() == Some(2),
                // Another part may have found the death first, and says so.
                GraphErrorKind::PeerFailed => error.reason().contains("part 2 is gone"),
                _ => false,
            };
            assert!(named, "{mode}: {text}");
        }
        assert!(killed.elapsed() < HANGS, "{mode}");
    }
}

#[test]
fn a_part_that_fails_says_why_to_all_others() {
    let chain = Arc::new(Chain::new(3));
    let errors =
        after_connects(&chain, &[TransferMode::GrpcTcp, TransferMode::RdmaZerocp], 1, |part, connected| {
            if part == Part(1) {
                let session = connected.unwrap();
                session.abort("the disk is full");
                // The failed part keeps its threads until the others know.
                session.leave(HANGS);
                return None;
            }
            let session = match connected {
                Ok(session) => session,
                // Part 1 knew first that all are ready, and has failed since.
                Err(error) => return Some(error),
            };
            let transfers = session.transfers(TransferMode::RdmaZerocp).unwrap();
            let mut executor = chain.executor(part, transfers, 1, ReceiveMode::PollingAsync);
            run(&mut executor, 0..ENDLESS, &mut Checks::of(&chain)).err()
        });
    for error in [&errors[0], &errors[2]] {
        let error = error.as_ref().unwrap();
        let text = chain_of(error);
        assert!(error.kind() == GraphErrorKind::PeerFailed && text.contains("the disk is full"), "{text}");
    }
}

#[test]
fn parts_that_run_something_else_name_the_difference() {
    let chain = Chain::new(2);
    let (listeners, addresses) = listeners(2);
    let errors: Vec<GraphError> = thread::scope(|scope| {
        let connecting = listeners.into_iter().enumerate().map(|(part, listener)| {
            let common = Fingerprint::new(&chain.graph, &chain.placements).with("the seed", &[part as u8]);
            let peering =
                peering(&chain, part, &addresses, &[TransferMode::GrpcTcp], 1 + part).fingerprint(common);
            scope.spawn(move || listener.connect(peering).unwrap_err())
        });
        let connecting: Vec<_> = connecting.collect();
        connecting.into_iter().map(|it| it.join().unwrap()).collect()
    });
    for (part, error) in errors.iter().enumerate() {
        let (other, address) = (1 - part, &addresses[1 - part]);
        assert_eq!(
            error.to_string(),
            format!(
                "part {other} at {address} runs something else, these differ: the seed and the window; start all parts with the same \
                 model, partition and settings"
            )
        );
    }
}

#[test]
fn a_part_that_does_not_come_is_named() {
    let chain = Chain::new(2);
    let (mut listeners, mut addresses) = listeners(1);
    // It listens and never answers.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    addresses.push(silent.local_addr().unwrap().to_string());
    let peering =
        peering(&chain, 0, &addresses, &[TransferMode::GrpcTcp], 1).timeout(Duration::from_millis(700));
    let error = listeners.remove(0).connect(peering).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (GraphErrorKind::Timeout, Some(1)), "{error}");
    assert!(
        error.to_string().starts_with(&format!("part 1 at {} is not connected after 0.7 s", addresses[1])),
        "{error}"
    );
}

#[test]
fn after_a_failed_connect_the_port_is_free() {
    let chain = Chain::new(2);
    let (mut listeners, mut addresses) = listeners(1);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    addresses.push(silent.local_addr().unwrap().to_string());
    for _ in 0..2 {
        let peering =
            peering(&chain, 0, &addresses, &[TransferMode::GrpcTcp], 1).timeout(Duration::from_millis(300));
        let error = listeners.remove(0).connect(peering).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (GraphErrorKind::Timeout, Some(1)), "{error}");
        listeners.push(bind(&addresses[0], config()).unwrap());
    }
}

#[test]
fn a_mode_that_needs_rdma_says_that_there_is_none() {
    for mode in TransferMode::ALL.into_iter().filter(|mode| *mode != TransferMode::GrpcTcp) {
        let chain = Chain::new(2);
        let no_rdma = || config().provider(Provider::Ibverbs);
        let listeners: Vec<Listener> = (0..2).map(|_| bind("127.0.0.1:0", no_rdma()).unwrap()).collect();
        let addresses: Vec<String> = listeners.iter().map(|it| it.address().to_string()).collect();
        thread::scope(|scope| {
            for (part, listener) in listeners.into_iter().enumerate() {
                let peering = peering(&chain, part, &addresses, &[mode], 1);
                scope.spawn(move || {
                    let error = listener.connect(peering).unwrap_err();
                    let text = chain_of(&error);
                    assert!(text.contains(&format!("mode {mode} needs RDMA to part")), "{text}");
                });
            }
        });
    }
}

#[test]
fn an_address_in_use_is_named() {
    let (listeners, addresses) = listeners(1);
    let error = bind(&addresses[0], config()).unwrap_err();
    assert!(error.to_string().starts_with(&format!("can't listen on {}", addresses[0])), "{error}");
    drop(listeners);
}
