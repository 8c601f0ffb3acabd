//! A device of libibverbs. The environment variable `RDMA_TEST_DEVICE` has its name, such as `rxe0`.

use std::io::{self, Write as _};
use std::process::Command;
use std::sync::Arc;

use tonic_rdma_verbs::ibverbs::{self, OpenOptions};
use tonic_rdma_verbs::{
    CompletionStatus, Context, QueuePairAddress, QueuePairState, VerbsError, VerbsErrorKind,
};

use crate::fabric::{ALL, Fabric, Options, Side, TIMEOUT, connected, until_placed, wait_until};

pub struct Device;

fn device() -> Option<String> {
    std::env::var("RDMA_TEST_DEVICE").ok()
}

fn is_soft_roce() -> bool {
    device().is_some_and(|name| name.starts_with("rxe"))
}

fn options() -> OpenOptions {
    OpenOptions { device: device(), inexact_windows: true, ..OpenOptions::default() }
}

fn is_soft_iwarp() -> bool {
    device().is_some_and(|name| name.starts_with("siw"))
}

fn is_iwarp() -> bool {
    let listed = ibverbs::list().unwrap_or_default();
    let found = listed.iter().find(|listed| Some(&listed.name) == device().as_ref());
    found.is_some_and(|found| found.transport == ibverbs::Transport::Iwarp)
}

/// Features that iWARP (RFC 5040 and 5041) lacks or has differently, and the cases that need them.
const IWARP: &[(&str, &[&str])] = &[
    ("iWARP has no immediate data (see write_with_immediate)", &["write_with_immediate_waits_for_a_receive"]),
    (
        "on iWARP a send does not wait for a receive (see receiver_not_ready_expires)",
        &["receiver_not_ready_for_ever", "receiver_not_ready_recovers"],
    ),
    (
        "the provider opens no windows on iWARP, and soft-iWARP has none",
        &[
            "a_window_is_open_until_it_is_dropped",
            "a_closed_window_is_not_read",
            "beyond_a_window",
            "a_window_for_one_right",
            "a_window_is_for_one_queue_pair",
            "windows_are_opened_again_and_again",
            "windows_end_with_their_queue_pair",
            "impossible_windows_are_refused",
        ],
    ),
];

/// Features that the driver of soft-iWARP lacks (Linux 6.1), and the cases that need them.
const SOFT_IWARP: &[(&str, &[&str])] = &[
    ("soft-iWARP stores the rights of a queue pair, but never checks them", &["missing_queue_pair_right"]),
    (
        "soft-iWARP does not check the right to READ (`siw_qp_sq_proc_tx`), only key, bounds and protection domain",
        &["missing_region_right_of_a_read", "ranges_not_to_be_read"],
    ),
];

/// Features that the driver of Soft-RoCE lacks (Linux 6.1), and the cases that need them.
const SOFT_ROCE: &[(&str, &[&str])] = &[(
    "Soft-RoCE checks the bounds of the region, not those of the window (`check_rkey`)",
    &["beyond_a_window", "a_granted_payload_to_the_byte"],
)];

/// A device that does not check the bounds of windows opens none, unless its user wants that.
#[test]
fn soft_roce_opens_no_windows_by_itself() {
    if !is_soft_roce() {
        return;
    }
    let context = ibverbs::open(&OpenOptions { device: device(), ..OpenOptions::default() }).unwrap();
    let attributes = context.attributes();
    assert_eq!((attributes.memory_windows, attributes.window_requests), (false, 0));
    assert!(Device.open().unwrap().attributes().memory_windows);
    let side = Side::in_context(context, &Options::default());
    assert!(!side.pair.has_windows());
    assert!(side.pair.open_window(&side.region, 0..64, ALL).unwrap().is_none());
}

impl Fabric for Device {
    fn name(&self) -> &'static str {
        "ibverbs"
    }

    fn open(&self) -> Result<Arc<dyn Context>, VerbsError> {
        ibverbs::open(&options())
    }

    fn skips(&self, case: &str) -> Option<String> {
        if device().is_none() {
            return Some("RDMA_TEST_DEVICE names no device".into());
        }
        let lists = [(is_iwarp(), IWARP), (is_soft_iwarp(), SOFT_IWARP), (is_soft_roce(), SOFT_ROCE)];
        let reasons = lists.into_iter().filter(|(applies, _)| *applies).flat_map(|(_, list)| list);
        let found = reasons.into_iter().find(|(_, cases)| cases.contains(&case));
        found.map(|(reason, _)| (*reason).to_owned())
    }

    /// Soft-RoCE reports every fault of a local segment by one status, and reports to the peer that the
    /// operation failed. For Soft-RoCE, an operation that the queue pair does not grant is an invalid
    /// request, as the specification requires (IBA vol. 1, 9.7.4.1.3). The software device reports such an
    /// operation like a missing right of the region.
    fn reports(&self, case: &str, status: CompletionStatus) -> CompletionStatus {
        use CompletionStatus::{
            Fatal, LocalLength, LocalOperation, LocalProtection, RemoteAccess, RemoteInvalidRequest,
            RemoteOperation,
        };
        match (case, status) {
            // soft-iWARP has one status for these faults, too, and another status for a receive.
            ("bad_local_key" | "local_range_out_of_bounds", LocalProtection) if is_soft_iwarp() => {
                LocalOperation
            }
            ("receive_into_deregistered_memory", LocalProtection) if is_soft_iwarp() => Fatal,
            _ if !is_soft_roce() => status,
            ("message_too_long_for_the_receive", RemoteInvalidRequest) => RemoteOperation,
            ("message_too_long_for_the_receive", LocalLength)
            | ("bad_local_key" | "receive_into_deregistered_memory", LocalProtection) => LocalOperation,
            ("missing_queue_pair_right", RemoteAccess) => RemoteInvalidRequest,
            _ => status,
        }
    }

    fn large_request(&self) -> u64 {
        64 << 20
    }

    fn completes_at_the_peer(&self) -> bool {
        !is_iwarp()
    }

    fn sends_wait_for_receives(&self) -> bool {
        !is_iwarp()
    }

    /// On iWARP, the answer to a READ is a write by the peer.
    fn sinks_are_open(&self) -> bool {
        is_iwarp()
    }

    /// The driver may round up the capacity of a completion queue.
    fn overruns_exactly(&self) -> bool {
        false
    }

    /// On iWARP, the device notices the end of the TCP connection.
    fn notices_death_when_idle(&self) -> bool {
        is_iwarp()
    }
}

/// Returns whether there is a device to test with. If there is none, prints a line.
fn has_device() -> bool {
    if device().is_none() {
        let _ = writeln!(io::stderr(), "left out: RDMA_TEST_DEVICE names no device");
    }
    device().is_some()
}

/// Returns whether the device has no path settings, because TCP chooses the path. In this case prints a line.
fn has_no_path() -> bool {
    if is_iwarp() {
        let _ = writeln!(io::stderr(), "left out: on iWARP, TCP has timeouts, retries and an MTU of its own");
    }
    is_iwarp()
}

#[test]
fn the_smaller_mtu_is_taken() {
    if !has_device() || has_no_path() {
        return;
    }
    let small = ibverbs::open(&OpenOptions { mtu: Some(256), ..options() }).unwrap();
    let a = Side::in_context(small, &Options::default());
    let b = Side::new(&Device, &Options::default());
    a.connect(&b);
    a.write(1, a.segment(0, 10_000), b.remote(0));
    a.expect(1, tonic_rdma_verbs::CompletionOpcode::Write);
}

#[test]
fn errors_name_the_missing_object_and_the_existing_ones() {
    if !has_device() {
        return;
    }
    let name = device().unwrap();
    let text = |options: OpenOptions| ibverbs::open(&options).unwrap_err().to_string();
    let error = text(OpenOptions { device: Some("no_such_device".into()), ..OpenOptions::default() });
    assert!(
        error.starts_with("RDMA device no_such_device does not exist") && error.contains(&name),
        "{error}"
    );
    let error = text(OpenOptions { port: Some(7), ..options() });
    assert_eq!(error, format!("port 7 of {name} does not exist; there is 1 (active)"));
    let error = text(OpenOptions { gid_index: Some(99_999), ..options() });
    assert!(error.starts_with("GID index 99999 of port 1") && error.contains("there is 0 ("), "{error}");
    let error = text(OpenOptions { mtu: Some(1500), ..options() });
    assert!(error.contains("asked for 1500"), "{error}");
}

#[test]
fn devices_are_listed() {
    if !has_device() {
        return;
    }
    let listed = ibverbs::list().unwrap();
    let found = listed.iter().find(|listed| Some(&listed.name) == device().as_ref()).unwrap();
    let _ = writeln!(io::stdout(), "{listed:#?}");
    let port = &found.ports.as_ref().unwrap()[0];
    assert_eq!((port.number, port.state), (1, ibverbs::PortState::Active));
    let context = ibverbs::open(&OpenOptions::default()).unwrap();
    assert_eq!(context.attributes().provider, "ibverbs");
    let _ = writeln!(io::stdout(), "{:#?}", Device.open().unwrap().attributes());
}

/// Opening a device again returns the open device, so that objects of both can be combined. Other options
/// open it anew.
#[test]
fn a_device_is_open_once() {
    if !has_device() {
        return;
    }
    let (one, two) = (Device.open().unwrap(), Device.open().unwrap());
    assert!(Arc::ptr_eq(&one, &two));
    let other = ibverbs::open(&OpenOptions { mtu: Some(256), ..options() }).unwrap();
    let queue = other.create_completion_queue(8).unwrap();
    let domain = one.alloc_protection_domain().unwrap();
    let error = domain.create_queue_pair(&queue, &queue, &Options::default().capacity).unwrap_err();
    assert_eq!(error.kind(), VerbsErrorKind::InvalidArgument, "{error}");
}

/// A connection attempt to an address that does not answer does not delay other connections, or the drop of
/// its queue pair. Run this as root, on iWARP, with the interface in `RDMA_TEST_NETDEV`, on a throw-away
/// machine: it adds a route.
#[test]
fn an_address_that_does_not_answer() {
    let Ok(interface) = std::env::var("RDMA_TEST_NETDEV") else { return };
    if !has_device() || !is_iwarp() {
        return;
    }
    // The end with the greater address connects to the other end.
    let lost = [10, 0, 0, 1];
    let route = ["route", "add", "10.0.0.0/24", "dev", &interface];
    assert!(Command::new("ip").args(route).status().unwrap().success());
    let side = Side::new(&Device, &Options::default());
    let mut address = side.pair.local_address().as_bytes().to_vec();
    address[26..30].copy_from_slice(&lost);
    side.pair.to_rtr(&QueuePairAddress::new(address).unwrap(), &side.settings).unwrap();
    side.pair.to_rts(&side.settings).unwrap();
    let (a, b) = connected(&Device, &Options::default());
    until_placed(&Device, &a, &b);
    let (dropped, wait_for_drop) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(side);
        dropped.send(()).unwrap();
    });
    wait_for_drop.recv_timeout(TIMEOUT).unwrap();
    until_placed(&Device, &b, &a);
}

/// When the network interface goes down, queue pairs end with this reason, and all outstanding requests come
/// back. Run this alone, as root, with the interface in `RDMA_TEST_NETDEV`, on a throw-away machine.
#[test]
fn a_port_goes_down() {
    let Ok(interface) = std::env::var("RDMA_TEST_NETDEV") else { return };
    if !has_device() {
        return;
    }
    let (a, b) = connected(&Device, &Options::default());
    b.post_receive(1, 0, 8);
    b.post_receive(2, 0, 8);
    assert!(a.context.async_event_fd().is_some());
    a.context.handle_events();
    assert_eq!((a.pair.state(), a.pair.failure()), (QueuePairState::Rts, None));
    assert!(Command::new("ip").args(["link", "set", &interface, "down"]).status().unwrap().success());
    wait_until("the Error state", || {
        a.context.handle_events();
        a.pair.state() == QueuePairState::Error && b.pair.state() == QueuePairState::Error
    });
    let reason = b.pair.failure().unwrap();
    assert_eq!(reason, format!("{}: port 1 went down", device().unwrap()));
    b.expect_failure(1, CompletionStatus::WorkRequestFlushed);
    b.expect_failure(2, CompletionStatus::WorkRequestFlushed);
    drop((a, b));
    let error = Device.open().unwrap_err();
    assert!(error.to_string().contains("no active port"), "{error}");
}

/// When the network interface gets another address, new queue pairs of the open device use that address. Run
/// this alone, as root, with the interface in `RDMA_TEST_NETDEV`, on a throw-away machine.
#[test]
fn a_changed_address_is_used_by_new_queue_pairs() {
    let Ok(interface) = std::env::var("RDMA_TEST_NETDEV") else { return };
    if !has_device() || is_iwarp() {
        return;
    }
    let ip = |words: &str| {
        let words = words.split(' ').chain(["dev", &interface]);
        assert!(Command::new("ip").args(words).status().unwrap().success());
    };
    let context = Device.open().unwrap();
    let pair = || {
        let side = || Side::in_context(Arc::clone(&context), &Options::default());
        let (a, b) = (side(), side());
        a.connect(&b);
        a.write(1, a.segment(0, 1000), b.remote(0));
        a.expect(1, tonic_rdma_verbs::CompletionOpcode::Write);
        a.pair.local_address()
    };
    let before = pair();
    ip("address add 10.78.0.9/24");
    ip("address delete 10.77.0.1/24");
    // The kernel changes the table of addresses a moment later.
    let listed =
        || ibverbs::list().unwrap().into_iter().find(|listed| Some(&listed.name) == device().as_ref());
    let new = "::ffff:10.78.0.9".parse::<std::net::Ipv6Addr>().unwrap();
    wait_until("the new address in the table", || {
        let gid = listed().unwrap().ports.as_ref().unwrap()[0].best_gid().copied();
        gid.is_some_and(|gid| gid.address == new)
    });
    let after = pair();
    let holds = |address: &QueuePairAddress| address.as_bytes().windows(4).any(|it| it == [10, 78, 0, 9]);
    assert!(!holds(&before) && holds(&after));
}
