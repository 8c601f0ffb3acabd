//! Groups of several ranks in one process. Each rank has its own runtime, device and server, as a process
//! has.

mod processes;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use support::free_address;
use tonic_rdma::{Config, Policy};

use super::agreement::Proposal;
use super::proto::Report;
use super::{Group, Launch, REPORTS, Settings};
use crate::error::{CollectiveError, CollectiveErrorKind, OperationStep, argument};

/// Generous: only a hang takes so long.
const HANG: Duration = Duration::from_secs(60);

fn settings() -> Settings {
    // Machines of tests are slow and shared, so a thread may wait longer for a core than one of a user.
    Settings { answer_timeout: Duration::from_secs(1), ..Settings::default() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs a future without any runtime.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    let begun = Instant::now();
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => thread::park_timeout(Duration::from_secs(1)),
        }
        assert!(begun.elapsed() < HANG, "a hang");
    }
}

fn join_all(size: usize) -> Vec<Group> {
    join_with(size, &settings(), &free_address())
}

fn join_with(size: usize, settings: &Settings, address: &str) -> Vec<Group> {
    let join = |rank| {
        let launch = Launch::new(rank, size, address).job("test");
        let settings = settings.clone();
        thread::spawn(move || block_on(Group::join(launch, settings)))
    };
    // Rank 0 comes last, so that the others have to try again.
    let threads: Vec<_> = (0..size).rev().map(join).collect();
    let mut groups: Vec<Group> = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
    groups.reverse();
    groups
}

fn shrink_all(groups: BTreeMap<usize, Group>) -> BTreeMap<usize, Result<Group, CollectiveError>> {
    let threads: Vec<_> = groups
        .into_iter()
        .map(|(original, group)| {
            let shrink = move || block_on(group.survivors());
            (original, thread::spawn(shrink))
        })
        .collect();
    threads.into_iter().map(|(original, thread)| (original, thread.join().unwrap())).collect()
}

/// Rank 1 forbids RDMA, as if it were on a host that has no device in common with that of rank 0.
#[test]
fn ranks_without_a_common_device_end_at_once_with_the_reason_and_what_to_do() {
    let address = free_address();
    let join = |rank: usize, policy| {
        let launch = Launch::new(rank, 2, &address).job("test");
        let config = Some(Config::default().policy(policy));
        // Far longer than a hang: who waits for the time limit of the set-up fails this test.
        let settings = Settings { config, bootstrap_timeout: 100 * HANG, ..settings() };
        thread::spawn(move || block_on(Group::join(launch, settings)))
    };
    let ranks = [join(0, Policy::Prefer), join(1, Policy::TcpOnly)];
    for (rank, joined) in ranks.into_iter().enumerate() {
        let error = joined.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), CollectiveErrorKind::Setup);
        for said in [&format!("rank {}", 1 - rank), "no RDMA to ", "tcp-only", "RDMA_DEVICE", "rdma link add"]
        {
            assert!(error.reason().contains(said), "{said:?} is missing at rank {rank}: {error}");
        }
        assert!(!error.reason().contains("  "), "{error}");
    }
}

#[test]
fn ranks_meet_without_a_runtime_and_have_channels_to_one_another() {
    for size in [1, 2, 5] {
        for (rank, group) in join_all(size).iter().enumerate() {
            assert_eq!((group.rank(), group.size(), group.generation()), (rank, size, 1));
            assert_eq!(group.ranks_of_this_host(), (0..size).collect::<Vec<_>>());
            assert!(group.cores(rank) >= 1);
            assert!(group.failure().reason().is_none());
            for other in 0..size {
                assert_eq!(
                    group.channel(other).map(|channel| channel.is_open()),
                    (other != rank).then_some(true)
                );
            }
        }
    }
}

#[test]
fn ranks_meet_on_a_current_thread_runtime() {
    let address = free_address();
    let other = Launch::new(1, 2, address.clone());
    let other = thread::spawn(move || runtime().block_on(Group::join(other, settings())).unwrap());
    let group = runtime().block_on(Group::join(Launch::new(0, 2, address), settings())).unwrap();
    // A runtime that has ended changes nothing.
    assert!(group.channel(1).unwrap().is_open() && other.join().unwrap().channel(0).unwrap().is_open());
}

#[test]
fn a_rank_that_does_not_come_is_named_on_both_sides() {
    let address = free_address();
    // Both ranks have to meet within this time, also on a slow machine.
    let settings = Settings { bootstrap_timeout: Duration::from_secs(8), ..settings() };
    let threads: Vec<_> = [0, 2]
        .map(|rank| (Launch::new(rank, 4, address.clone()), settings.clone()))
        .map(|(launch, settings)| thread::spawn(move || block_on(Group::join(launch, settings))))
        .into_iter()
        .collect();
    for thread in threads {
        let message = thread.join().unwrap().unwrap_err().to_string();
        let expected =
            format!("the ranks did not meet at {address} within 8s: ranks 1 and 3 of 4 have not come");
        assert_eq!(message, expected);
    }
}

#[test]
fn a_missing_rank_0_is_named_with_its_address() {
    let address = free_address();
    // Long enough for an attempt, also on a slow machine.
    let settings = Settings { bootstrap_timeout: Duration::from_secs(4), ..settings() };
    let message =
        block_on(Group::join(Launch::new(1, 2, address.clone()), settings)).unwrap_err().to_string();
    let expected =
        format!("the ranks did not meet at {address} within 4s: rank 0 has not come, or can't be reached: ");
    assert!(message.starts_with(&expected), "{message}");
    assert!(message.contains("refused"), "{message}");
}

#[test]
fn a_rank_of_another_size_is_refused_on_both_sides() {
    let address = free_address();
    // Rank 1 has to come within this time, also on a slow machine.
    let settings = Settings { bootstrap_timeout: Duration::from_secs(8), ..settings() };
    let (launch, short) = (Launch::new(0, 2, address.clone()), settings.clone());
    let rank_0 = thread::spawn(move || block_on(Group::join(launch, short)));
    let refused =
        block_on(Group::join(Launch::new(1, 3, address.clone()), settings)).unwrap_err().to_string();
    let reason = "rank 1 came with a size of 3, and rank 0 has 2: all ranks need the same";
    assert_eq!(refused, format!("rank 0 at {address} refused rank 1: {reason}"));
    let message = rank_0.join().unwrap().unwrap_err().to_string();
    assert!(message.ends_with(&format!("rank 1 of 2 has not come; refused: {reason}")), "{message}");
}

#[test]
fn one_rank_twice_is_refused_and_the_group_forms() {
    let address = free_address();
    let join = |rank| {
        let launch = Launch::new(rank, 3, address.clone());
        thread::spawn(move || block_on(Group::join(launch, settings())))
    };
    let (rank_0, first, second) = (join(0), join(1), join(1));
    // Without rank 2 the group does not form, so a rank 1 that ends was refused.
    while !first.is_finished() && !second.is_finished() {
        thread::sleep(Duration::from_millis(5));
    }
    let last = join(2);
    assert!([rank_0, last].into_iter().all(|thread| thread.join().unwrap().is_ok()));
    let joined = [first, second].map(|thread| thread.join().unwrap());
    let errors: Vec<String> =
        joined.iter().filter_map(|joined| joined.as_ref().err().map(ToString::to_string)).collect();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].contains("refused rank 1: rank 1 has come already"), "{errors:?}");
}

/// Another process that reaches the port of a rank could otherwise take all links of its device, before the
/// ranks open theirs.
#[test]
fn only_ranks_have_links_to_a_rank() {
    let groups = join_all(2);
    let address = groups[0].channel(1).unwrap().endpoint().to_owned();
    let opened = runtime().block_on(async move {
        let outsider = tonic_rdma_tensor::RdmaDevice::builder().build().unwrap();
        outsider.channel(&address, 0).await
    });
    let refused = opened.err().map(|error| error.to_string());
    assert!(
        refused.as_ref().is_some_and(|text| text.contains("does not belong to the group")),
        "{refused:?}"
    );
}

#[test]
fn a_busy_port_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let message =
        block_on(Group::join(Launch::new(0, 2, address.clone()), settings())).unwrap_err().to_string();
    assert!(message.starts_with(&format!("rank 0 of 2 can't listen on {address}: ")), "{message}");
    assert!(message.contains("RDMA_COLLECTIVE_ADDRESS"), "{message}");
}

#[test]
fn bad_numbers_and_addresses_are_refused() {
    for (launch, expected) in [
        (Launch::new(2, 2, "127.0.0.1:1"), "rank 2 of 2"),
        (Launch::new(0, 0, "127.0.0.1:1"), "a group of 0 ranks"),
        (Launch::new(0, 2, "127.0.0.1:0"), "has port 0"),
        (Launch::new(0, 2, "nonsense"), "\"nonsense\" is no host:port"),
        (Launch::new(0, 2, "127.0.0.1:1").job("x".repeat(300)), "the job's name has 300 bytes"),
    ] {
        let message = block_on(Group::join(launch, settings())).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_lost_rank_is_named_with_the_place_of_this_rank() {
    let mut groups = join_all(3);
    let at = OperationStep { operation: 7, step: 2, steps: 9 };
    groups.iter().for_each(|group| group.position().set(at, Some(2)));
    drop(groups.pop());
    for group in &groups {
        let failure = block_on(group.failure().wait()).clone();
        assert_eq!(
            (failure.kind(), failure.lost_rank()),
            (CollectiveErrorKind::RankLost, Some(2)),
            "{failure}"
        );
        assert!(failure.reason().contains(&at.to_string()), "{failure}");
    }
}

#[test]
fn a_report_ends_the_operations_of_all_ranks() {
    let groups = join_all(3);
    groups[1].report(argument("the lengths differ"));
    for group in [&groups[0], &groups[2]] {
        let failure = block_on(group.failure().wait()).to_string();
        assert_eq!(failure, "rank 1 ended the operations of this group: the lengths differ");
    }
    assert_eq!(groups[1].failure().reason().unwrap().to_string(), "the lengths differ");
}

/// The rank that notices a loss first reports it to the others, which may learn of it before they notice it.
#[test]
fn a_loss_that_another_rank_reports_is_the_loss_of_that_rank() {
    let groups = join_all(3);
    let at = OperationStep { operation: 7, step: 2, steps: 9 };
    groups[1].position().set(at, None);
    groups[0].report(CollectiveError::rank_lost(2, at, "the link to 10.0.0.3:1 is lost: it ended"));
    let failure = block_on(groups[1].failure().wait()).clone();
    assert_eq!((failure.kind(), failure.lost_rank()), (CollectiveErrorKind::RankLost, Some(2)));
    assert_eq!(
        failure.reason(),
        format!("rank 2 is lost, noticed {at}: the link to 10.0.0.3:1 is lost: it ended, as rank 0 noticed")
    );
    let failure = block_on(groups[2].failure().wait()).clone();
    assert_eq!(
        (failure.kind(), failure.rank()),
        (CollectiveErrorKind::Reported, Some(0)),
        "rank 2 lives: {failure}"
    );
}

/// A rank says the same of one generation each time, so that older reports stay for those that need them.
#[test]
fn a_rank_reports_each_generation_once() {
    let groups = join_all(2);
    groups[1].report(argument("the lengths differ"));
    (0..=REPORTS).for_each(|_| groups[1].send_report());
    let reports = groups[1].session.bootstrap.standing.borrow().details.reports.clone();
    assert_eq!(reports, [Report { generation: 1, message: "the lengths differ".into(), loss: None }]);
}

/// Other ranks may be some generations ahead, and their reports of this rank's generation may be gone.
#[test]
fn a_report_of_a_later_generation_ends_the_operations_of_this_one() {
    let groups = join_all(2);
    let report = Report { generation: 7, message: "a rank is lost".into(), loss: None };
    groups[1].session.bootstrap.standing.send_modify(|standing| standing.details.reports.push(report));
    let failure = block_on(groups[0].failure().wait()).to_string();
    assert_eq!(failure, "rank 1 ended the operations of this group: a rank is lost");
}

#[test]
fn only_the_latest_reports_of_a_rank_are_heard() {
    let groups = join_all(2);
    let report = |generation, message: &str| Report { generation, message: message.into(), loss: None };
    let mut reports = vec![report(0, "before the first generation"); REPORTS + 1];
    (reports[0], reports[REPORTS]) = (report(1, "too old"), report(1, "the lengths differ"));
    groups[1].session.bootstrap.standing.send_modify(|standing| standing.details.reports = reports);
    let failure = block_on(groups[0].failure().wait()).to_string();
    assert_eq!(failure, "rank 1 ended the operations of this group: the lengths differ");
}

#[test]
fn reports_longer_than_those_of_a_rank_are_refused() {
    let groups = join_all(2);
    let [listener, sender] = &groups[..] else { panic!("two ranks") };
    let long = Report { generation: 1, message: "x".repeat(64 << 10), loss: None };
    sender.session.bootstrap.standing.send_modify(|standing| standing.details.reports = vec![long]);
    // The other rank ends its watch, and begins a new one.
    let begun = Instant::now();
    while sender.session.bootstrap.is_watched() && listener.failure().reason().is_none() {
        assert!(begun.elapsed() < HANG, "a hang");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(listener.failure().reason().is_none(), "a long report was heard");
    let short = Report { generation: 1, message: "the lengths differ".into(), loss: None };
    sender.session.bootstrap.standing.send_modify(|standing| standing.details.reports = vec![short]);
    let failure = block_on(listener.failure().wait()).to_string();
    assert_eq!(failure, "rank 1 ended the operations of this group: the lengths differ");
}

#[test]
fn the_culprit_is_the_end_of_the_chain() {
    // A rank that lives and answers later would be the culprit.
    let settings = Settings { answer_timeout: HANG, ..settings() };
    let groups = join_with(4, &settings, &free_address());
    let at = OperationStep { operation: 1, step: 0, steps: 4 };
    groups[0].position().set(at, Some(1));
    groups[1].position().set(at, Some(3));
    groups[3].position().set(at, None);
    assert_eq!(block_on(groups[0].find_culprit(1)), 3);
    // From a ring nothing follows, so the first suspect stays.
    groups[3].position().set(at, Some(1));
    assert_eq!(block_on(groups[0].find_culprit(1)), 1);
    assert_eq!(block_on(groups[0].find_culprit(9)), 9);
}

fn members_of(group: &Group) -> Vec<usize> {
    (0..group.size()).filter_map(|rank| group.original(rank)).collect()
}

/// Agrees, as one rank, until the members of the group are the expected ones. Returns the last group, and the
/// generations in which the rank was.
fn agree_until(
    original: usize,
    mut group: Group,
    expected: &[usize],
    seed: u64,
) -> (Group, Vec<(u64, Vec<usize>)>) {
    let begun = Instant::now();
    let mut generations = Vec::new();
    loop {
        assert!(begun.elapsed() < HANG, "seed {seed}: rank {original} was in {generations:?}");
        let survivors = block_on(group.survivors());
        group = survivors.unwrap_or_else(|error| panic!("seed {seed}: rank {original}: {error}"));
        generations.push((group.generation(), members_of(&group)));
        if members_of(&group) == expected {
            return (group, generations);
        }
        // As a user would notice: the next operation fails. A rank may have been in an agreement before it
        // died.
        block_on(group.failure().wait());
    }
}

#[test]
fn survivors_agree_whatever_dies_and_when() {
    for seed in 0..8 {
        let mut random = fastrand::Rng::with_seed(seed);
        let size = random.usize(3..=6);
        let mut living: BTreeMap<usize, Group> = join_all(size).into_iter().enumerate().collect();
        let deaths = random.usize(1..size);
        let mut order: Vec<usize> = (0..size).collect();
        random.shuffle(&mut order);
        let (dying, staying) = order.split_at(deaths);
        // The first dies before the agreement, and the others during it.
        drop(living.remove(&dying[0]));
        let killers: Vec<_> = dying[1..]
            .iter()
            .filter_map(|rank| living.remove(rank))
            .map(|group| {
                let delay = Duration::from_micros(random.u64(0..30_000));
                thread::spawn(move || {
                    let agreeing = group.clone();
                    let end = async move {
                        tokio::select! {
                            _ = agreeing.survivors() => {}
                            () = tokio::time::sleep(delay) => {}
                        }
                    };
                    runtime().block_on(end);
                    drop(group);
                })
            })
            .collect();
        let mut expected = staying.to_vec();
        expected.sort_unstable();
        // Each rank agrees again as soon as its group has failed, and waits for no other rank. A rank may
        // have promised a later generation than that of a group with a dead rank, and then needs the other
        // ranks of this group for its own agreement.
        let agreeing: Vec<_> = living
            .into_iter()
            .map(|(original, group)| {
                let expected = expected.clone();
                thread::spawn(move || agree_until(original, group, &expected, seed))
            })
            .collect();
        let agreed: Vec<_> = agreeing.into_iter().map(|rank| rank.join().unwrap()).collect();
        let mut of_generation: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (generation, members) in agreed.iter().flat_map(|(_, generations)| generations) {
            let known = of_generation.entry(*generation).or_insert_with(|| members.clone());
            assert_eq!(known, members, "seed {seed}: generation {generation}");
        }
        let living: Vec<Group> = agreed.into_iter().map(|(group, _)| group).collect();
        assert!(living.iter().all(|group| group.generation() == living[0].generation()), "seed {seed}");
        killers.into_iter().for_each(|killer| killer.join().unwrap());
        for group in &living {
            assert!(group.failure().reason().is_none(), "seed {seed}");
            assert!(
                (0..group.size()).filter_map(|rank| group.channel(rank)).all(|channel| channel.is_open())
            );
        }
    }
}

#[test]
fn the_ranks_of_survivors_are_new_and_in_the_old_order() {
    let mut groups = join_all(4);
    drop(groups.remove(1));
    let groups: BTreeMap<usize, Group> = [0, 2, 3].into_iter().zip(groups).collect();
    let survivors = block_on_all(&groups);
    assert!(survivors.iter().all(|ranks| ranks == &[0, 2, 3]));
    for (index, group) in shrink_all(groups).into_values().enumerate() {
        let group = group.unwrap();
        assert_eq!((group.rank(), group.size(), group.original(index)), (index, 3, Some([0, 2, 3][index])));
    }
}

fn block_on_all(groups: &BTreeMap<usize, Group>) -> Vec<Vec<usize>> {
    let threads: Vec<_> = groups
        .values()
        .cloned()
        .map(|group| thread::spawn(move || members_of(&block_on(group.survivors()).unwrap())))
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn a_rank_that_does_not_take_part_is_left_out_and_is_told_so() {
    let address = free_address();
    let threads: Vec<_> = (0..3)
        .map(|rank| Launch::new(rank, 3, address.clone()))
        .map(|launch| {
            // Ranks 0 and 2 have to take part within this time, also on a slow machine.
            let settings = Settings { agreement_timeout: Duration::from_secs(5), ..settings() };
            thread::spawn(move || block_on(Group::join(launch, settings)).unwrap())
        })
        .collect();
    let groups: Vec<Group> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    let late = groups[1].clone();
    let others = BTreeMap::from([(0, groups[0].clone()), (2, groups[2].clone())]);
    assert_eq!(block_on_all(&others), [[0, 2], [0, 2]]);
    // Nothing failed, so that only a report tells this rank of the agreement.
    let heard = block_on(late.failure().wait()).to_string();
    assert!(heard.ends_with("this rank has asked for the group of the survivors"), "{heard}");
    let error = block_on(late.survivors()).unwrap_err();
    assert!(error.reason().contains("later group"), "{error}");
    let again = block_on(late.survivors()).unwrap_err();
    for error in [error, again] {
        assert_eq!((error.kind(), error.rank()), (CollectiveErrorKind::Excluded, Some(1)), "{error}");
    }
}

/// A rank that has promised the largest number to another coordinator refuses every proposal.
#[test]
fn an_agreement_without_promises_ends() {
    let settings = Settings { agreement_timeout: Duration::from_millis(500), ..settings() };
    let groups = join_with(2, &settings, &free_address());
    for group in &groups {
        let state = &group.session.state;
        state.agree(1, true);
        let proposal = Proposal { generation: u64::MAX, coordinator: 0, members: vec![0, 1] };
        state.promise(&proposal).unwrap();
    }
    for (rank, result) in shrink_all(groups.into_iter().enumerate().collect()) {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("the survivors did not agree within"), "rank {rank}: {message}");
    }
}

#[test]
fn a_stranger_gets_no_list_of_regions() {
    const DESCRIBE: &str = "/tonic_rdma.tensor.v1.TensorDevice/Describe";
    let address = free_address();
    let _groups = join_with(2, &settings(), &address);
    let refused = runtime().block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
        let mut caller = tonic::client::Grpc::new(channel.connect().await.unwrap());
        caller.ready().await.unwrap();
        let path = tonic::codegen::http::uri::PathAndQuery::from_static(DESCRIBE);
        let codec = tonic_prost::ProstCodec::<(), ()>::default();
        caller.unary(tonic::Request::new(()), path, codec).await.unwrap_err()
    });
    assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{refused}");
}
