//! Whether two processes can share a software device, by their identities, and whether a client's queue pair
//! waits at the client's device. A server finds both out before it spends a thread and memory on the client.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{sleep, timeout};

use crate::endpoint::config::Provider;
use crate::endpoint::provider::unusable;
use crate::endpoint::reason::{RdmaUnavailable, ReasonCode};
use crate::error::RdmaError;
use crate::wire::hello::HostIdentity;
use tonic_rdma_verbs::unstable::{self, DeviceOwner, SoftDevice, SoftQueuePair};
use tonic_rdma_verbs::{QueuePairAddress, VerbsError, VerbsErrorKind};

/// The software device of one client.
#[derive(Debug, Default)]
pub struct Devices {
    /// The device, and why it is not asked again.
    asked: Option<(SoftDevice, Option<RdmaError>)>,
}

impl Devices {
    /// Waits until the client's device has confirmed that the queue pair at `address` waits for its peer, and
    /// returns the owner of the device. Returns `None` for other providers, because they connect queue pairs
    /// without asking the peer's device.
    ///
    /// # Errors
    /// The device does not answer in time, can't be found, is of a user that this process does not let in, or
    /// has no such queue pair. Each later call fails too then. The client has named another device before.
    pub async fn ask(
        &mut self,
        provider: Provider,
        address: &QueuePairAddress,
    ) -> Result<Option<DeviceOwner>, RdmaError> {
        if provider != Provider::Soft {
            return Ok(None);
        }
        let queue_pair = SoftQueuePair::at(address).map_err(unusable)?;
        let device = queue_pair.device();
        let (first, failed) = self.asked.get_or_insert((device, None));
        if *first != device {
            let reason = "peer address: the peer named two software devices, and a process has one";
            return Err(unusable(VerbsError::new(VerbsErrorKind::InvalidAddress, reason)));
        }
        if let Some(error) = failed {
            return Err(error.clone());
        }
        ask(&queue_pair).await.map(Some).map_err(|error| failed.insert(unusable(error)).clone())
    }
}

/// Returns the times between two tries to connect to a device that takes no connection. They double, because
/// each try costs system calls on the runtime's thread, and very many clients can name such a device.
fn pauses() -> impl Iterator<Item = Duration> {
    (0..).map(|tries| Duration::from_millis(320.min(1 << tries.min(20))))
}

#[allow(deprecated, reason = "sound for a descriptor that is owned; its successor is unsafe to call")]
async fn ask(queue_pair: &SoftQueuePair) -> Result<DeviceOwner, VerbsError> {
    let failed = |cause: io::Error| VerbsError::os("asking the peer's device", cause);
    let answered = async {
        let mut pauses = pauses();
        let ping = loop {
            if let Some(ping) = queue_pair.ping()? {
                break ping;
            }
            sleep(pauses.next().unwrap_or_default()).await;
        };
        let ping = AsyncFd::with_interest(ping, Interest::READABLE).map_err(failed)?;
        ping.async_io(Interest::READABLE, |ping| ping.answer()).await.map_err(failed)
    };
    let patience = SoftQueuePair::TIMEOUT;
    timeout(patience, answered).await.unwrap_or_else(|_| {
        let reason = format!("peer device unreachable: the peer's device did not answer within {patience:?}");
        Err(VerbsError::new(VerbsErrorKind::Unreachable, reason))
    })
}

/// Returns this process's identity, for its hello. A part that can't be read is zero. A boot id of zero
/// equals no other.
pub(super) fn local() -> HostIdentity {
    HostIdentity {
        boot_id: boot_id().unwrap_or_default(),
        network_namespace: std::fs::metadata("/proc/self/ns/net").map(|meta| meta.ino()).unwrap_or_default(),
        uid: rustix::process::geteuid().as_raw(),
        pid: std::process::id(),
    }
}

/// The part of the host that this process's software device reaches.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    /// The device finds its peers through a directory, which containers can share.
    directory: bool,
    /// The device lets in processes of other users.
    any_user: bool,
}

impl Reach {
    /// Returns the reach that the environment of this process sets.
    pub(super) fn of_this_process() -> Self {
        Self { directory: unstable::soft_uses_directory(), any_user: unstable::soft_admits_any_user() }
    }
}

/// Checks that two processes can share a software device, as far as the hello shows it. With a directory,
/// only the device finds out whether it reaches the peer: namespaces do not matter, and a user namespace has
/// its own numbers of users.
pub(super) fn check(ours: &HostIdentity, theirs: &HostIdentity, reach: Reach) -> Result<(), RdmaUnavailable> {
    if ours.boot_id != theirs.boot_id || ours.boot_id == [0; 16] {
        let reason = "the software device reaches this host only, and the peer is on another";
        return Err(RdmaUnavailable::new(ReasonCode::OtherHost, reason));
    }
    if reach.directory {
        return Ok(());
    }
    if ours.network_namespace != theirs.network_namespace {
        return Err(RdmaUnavailable::new(
            ReasonCode::OtherNetworkNamespace,
            "the peer is in another network namespace, out of the software device's reach: \
             set RDMA_SOFT_DIR to one directory at both ends",
        ));
    }
    if !reach.any_user && ours.uid != theirs.uid {
        let reason = format!(
            "the peer runs as another user (uid {} here, {} there): \
             set RDMA_SOFT_PEERS=any at both ends to share memory with other users",
            ours.uid, theirs.uid
        );
        return Err(RdmaUnavailable::new(ReasonCode::UntrustedPeer, reason));
    }
    Ok(())
}

fn boot_id() -> Option<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits = text.trim().replace('-', "");
    let id = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(id.to_be_bytes())
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::sync::Arc;

    use support::{Runtime, Silence, SilentDevice};
    use tonic_rdma_verbs::{Access, PathSettings, QueuePair, QueuePairCapacity, soft};

    use super::*;

    pub(in super::super) fn queue_pair() -> Arc<dyn QueuePair> {
        let domain = soft::open().unwrap().alloc_protection_domain().unwrap();
        let queue = soft::open().unwrap().create_completion_queue(16).unwrap();
        let capacity = QueuePairCapacity {
            send_requests: 4,
            receive_requests: 4,
            send_segments: 1,
            receive_segments: 1,
            inline: 64,
        };
        let pair = domain.create_queue_pair(&queue, &queue, &capacity).unwrap();
        pair.to_init(Access::LOCAL_WRITE).unwrap();
        pair
    }

    fn address(of: &dyn QueuePair, change: impl Fn(&mut [u8])) -> QueuePairAddress {
        let mut bytes = of.local_address().as_bytes().to_vec();
        change(&mut bytes);
        QueuePairAddress::new(bytes).unwrap()
    }

    /// The names of devices are public. So only a queue pair that waits for its peer, and its secret, say
    /// whose client it is.
    #[test]
    fn a_device_that_a_client_merely_names_is_not_its_own() {
        Runtime::CurrentThread.run(async {
            let ask = async |address| Devices::default().ask(Provider::Soft, &address).await;
            let (ours, theirs) = (queue_pair(), queue_pair());
            let whole = address(&*ours, |_| ());
            assert!(ask(whole.clone()).await.unwrap().is_some());
            assert!(ask(whole.clone()).await.unwrap().is_some(), "the question takes nothing");
            let number = ask(address(&*ours, |bytes| bytes[14..18].fill(0))).await;
            let token = ask(address(&*ours, |bytes| bytes[18] ^= 1)).await;
            for refused in [number, token] {
                let reason = refused.unwrap_err().to_string();
                assert!(reason.contains("no such queue pair waits there"), "{reason}");
            }
            let path = PathSettings::default();
            theirs.to_rtr(&ours.local_address(), &path).unwrap();
            let taken = ask(whole).await.unwrap_err().to_string();
            assert!(taken.contains("no such queue pair waits there"), "{taken}");
        });
    }

    /// A process has one software device, so a client that names several ones doesn't make this side wait for
    /// each of them.
    #[test]
    fn a_client_has_one_device() {
        Runtime::CurrentThread.run(async {
            let (pair, other) = (queue_pair(), SilentDevice::new(Silence::Accepts));
            let mut devices = Devices::default();
            assert!(devices.ask(Provider::Soft, &address(&*pair, |_| ())).await.unwrap().is_some());
            let second = devices.ask(Provider::Soft, &address(&*pair, |bytes| other.replace_in(bytes))).await;
            let reason = second.unwrap_err().to_string();
            assert!(reason.contains("two software devices"), "{reason}");
        });
    }

    /// Very many clients can name one device that takes no connection.
    #[test]
    fn a_device_that_takes_no_connection_is_tried_seldom() {
        let mut passed = Duration::ZERO;
        let tries = pauses().take_while(|pause| {
            passed += *pause;
            passed < SoftQueuePair::TIMEOUT
        });
        assert!(tries.count() < 20);
    }
}

#[cfg(test)]
mod identity_tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const HERE: HostIdentity = HostIdentity { boot_id: [7; 16], network_namespace: 1, uid: 2, pid: 3 };
    const DEFAULT: Reach = Reach { directory: false, any_user: false };
    const HOST: &str = "the software device reaches this host only";
    const NAMESPACE: &str = "the peer is in another network namespace";

    fn is_refused(theirs: HostIdentity, reach: Reach, reason: &str) -> bool {
        check(&HERE, &theirs, reach).unwrap_err().to_string().starts_with(reason)
    }

    #[test]
    fn by_default_one_user_in_one_network_namespace() {
        check(&HERE, &HostIdentity { pid: 4, ..HERE }, DEFAULT).unwrap();
        assert!(is_refused(HostIdentity { network_namespace: 2, ..HERE }, DEFAULT, NAMESPACE));
        let user = "the peer runs as another user (uid 2 here, 9 there)";
        assert!(is_refused(HostIdentity { uid: 9, ..HERE }, DEFAULT, user));
    }

    #[test]
    fn settings_extend_the_reach_within_the_host() {
        let other = HostIdentity { network_namespace: 2, uid: 9, ..HERE };
        for any_user in [false, true] {
            let directory = Reach { directory: true, any_user };
            check(&HERE, &other, directory).unwrap();
            let elsewhere = HostIdentity { boot_id: [8; 16], ..HERE };
            assert!(is_refused(elsewhere, directory, HOST));
        }
        let any = Reach { directory: false, any_user: true };
        check(&HERE, &HostIdentity { uid: 9, ..HERE }, any).unwrap();
        assert!(is_refused(other, any, NAMESPACE));
        let unknown = HostIdentity { boot_id: [0; 16], ..HERE };
        assert!(check(&unknown, &unknown, any).unwrap_err().to_string().starts_with(HOST));
    }
}
