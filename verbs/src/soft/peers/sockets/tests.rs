#![allow(clippy::unwrap_used, reason = "tests")]
use crate::VerbsErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;

use super::*;
use crate::queue_pair::random;

/// A directory of its own for one test. Dropping it removes it.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("tonic-rdma-test-{:x}", random().unwrap()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn sockets(&self) -> Sockets {
        Sockets::new(Some(self.0.as_os_str())).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

fn device(sockets: &Sockets) -> DeviceId {
    DeviceId { process: std::process::id(), nonce: random().unwrap(), directory: sockets.identity() }
}

fn listen(sockets: &Sockets, device: DeviceId, policy: Policy) -> Listener {
    sockets.listen(device, policy, Origin::here().unwrap()).unwrap()
}

fn refusal(value: impl AsRef<OsStr>) -> String {
    Sockets::new(Some(value.as_ref())).unwrap_err().to_string()
}

#[test]
fn devices_find_one_another_in_one_place() {
    let scratch = Scratch::new();
    for sockets in [Sockets::Namespace, scratch.sockets()] {
        let device = device(&sockets);
        let listener = listen(&sockets, device, Policy::User);
        sockets.connect(device, Policy::User, soon()).unwrap();
        drop(listener);
        let refused = sockets.connect(device, Policy::User, soon()).map_err(|error| error.kind());
        assert_eq!(refused.err(), Some(VerbsErrorKind::Unreachable));
    }
    assert_eq!(scratch.names(), [""; 0], "the file of a device that closed is gone");
}

/// Any process can listen under the name of a device, and accept nothing. This costs a caller a part of its
/// time only, and none if the file shows that the device belongs to a user who is not let in.
#[test]
fn a_listener_that_accepts_nothing_is_given_up() {
    let scratch = Scratch::new();
    for sockets in [Sockets::Namespace, scratch.sockets()] {
        let device = device(&sockets);
        let listener = listen(&sockets, device, Policy::User);
        let waiting: Vec<_> = (0..=BACKLOG).map(|_| sockets.connect(device, Policy::User, soon())).collect();
        assert!(waiting.iter().all(Result::is_ok));
        let fails = |policy| {
            let start = Instant::now();
            let error = sockets.connect(device, policy, soon()).unwrap_err();
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
            error.to_string()
        };
        assert!(fails(Policy::User).contains("accepts no connection"));
        let owner = rustix::process::geteuid().as_raw() + 1;
        let another = |file: &PathBuf| std::os::unix::fs::chown(file, Some(owner), None).is_ok();
        // Only root can give a file to another user.
        if listener.file.as_ref().is_some_and(another) && rustix::process::geteuid().is_root() {
            assert!(fails(Policy::User).contains("RDMA_SOFT_PEERS=any"));
            assert!(fails(Policy::Any).contains("accepts no connection"));
        }
    }
}

/// A link could lead to a file system that does not answer.
#[test]
fn links_to_sockets_are_not_followed() {
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let (sockets, other) = (scratch.sockets(), elsewhere.sockets());
    let device = device(&sockets);
    let listener = listen(&other, device, Policy::User);
    std::os::unix::fs::symlink(listener.file.as_ref().unwrap(), scratch.0.join(file_name(device))).unwrap();
    let error = sockets.connect(device, Policy::User, soon()).unwrap_err().to_string();
    assert!(error.contains("another process has replaced the file"), "{error}");
    assert!(!is_dead(&scratch.0.join(file_name(device))), "nobody can say");
}

/// Containers of one node have the same process numbers.
#[test]
fn process_numbers_do_not_matter() {
    let scratch = Scratch::new();
    let sockets = scratch.sockets();
    let here = device(&sockets);
    let listener = listen(&sockets, here, Policy::User);
    sockets.connect(DeviceId { process: 1, ..here }, Policy::User, soon()).unwrap();
    drop(listener);
}

#[test]
fn the_reason_names_both_places() {
    let (one, two) = (Scratch::new(), Scratch::new());
    let reason = |ours: &Sockets, theirs: &Sockets| {
        let there = device(theirs);
        let listener = listen(theirs, there, Policy::User);
        let error = ours.connect(there, Policy::User, soon()).unwrap_err().to_string();
        drop(listener);
        error
    };
    let different = reason(&one.sockets(), &two.sockets());
    assert!(different.contains("the peer's RDMA_SOFT_DIR is another directory"), "{different}");
    assert!(different.contains(&one.0.display().to_string()), "{different}");
    let theirs = reason(&Sockets::Namespace, &two.sockets());
    assert!(theirs.contains("this process has no RDMA_SOFT_DIR"), "{theirs}");
    let ours = reason(&one.sockets(), &Sockets::Namespace);
    assert!(ours.contains("the peer has no RDMA_SOFT_DIR"), "{ours}");
    assert!(ours.contains(&one.0.display().to_string()), "{ours}");
    let gone = one.sockets().connect(device(&one.sockets()), Policy::User, soon()).unwrap_err().to_string();
    assert!(gone.contains("the peer is gone"), "{gone}");
    let gone = Sockets::Namespace
        .connect(device(&Sockets::Namespace), Policy::User, soon())
        .unwrap_err()
        .to_string();
    assert!(gone.contains("another network namespace"), "{gone}");
}

#[test]
fn values_that_name_no_usable_directory_are_refused() {
    let scratch = Scratch::new();
    assert_eq!(refusal(""), "RDMA_SOFT_DIR=\"\": takes the absolute path of a directory");
    assert_eq!(refusal("run"), "RDMA_SOFT_DIR=\"run\": takes the absolute path of a directory");
    let missing = scratch.0.join("missing");
    assert!(refusal(&missing).contains(&format!("RDMA_SOFT_DIR={missing:?}")), "{}", refusal(&missing));
    let file = scratch.0.join("file");
    fs::write(&file, "").unwrap();
    assert_eq!(refusal(&file), format!("RDMA_SOFT_DIR={file:?}: is not a directory"));
    let long = scratch.0.join("x".repeat(LONGEST_PATH - NAME - scratch.0.as_os_str().len() - 1));
    fs::create_dir(&long).unwrap();
    assert!(refusal(&long).contains("take a shorter path"), "{}", refusal(&long));
    // A path of the longest length works.
    let fits = PathBuf::from(long.to_str().unwrap().strip_suffix('x').unwrap());
    fs::create_dir(&fits).unwrap();
    let sockets = Sockets::new(Some(fits.as_os_str())).unwrap();
    let device = device(&sockets);
    let listener = listen(&sockets, device, Policy::Any);
    sockets.connect(device, Policy::User, soon()).unwrap();
    drop(listener);
}

#[test]
fn the_policy_decides_the_mode_of_the_file() {
    let scratch = Scratch::new();
    let sockets = scratch.sockets();
    for (policy, mode) in [(Policy::User, 0o600), (Policy::Any, 0o666)] {
        let listener = listen(&sockets, device(&sockets), policy);
        let file = fs::symlink_metadata(listener.file.as_ref().unwrap()).unwrap();
        assert_eq!(file.permissions().mode() & 0o7777, mode);
    }
}

/// A process that can write to the directory can't make this process change the mode of another file.
#[test]
fn no_other_file_gets_the_mode() {
    let scratch = Scratch::new();
    let (target, link) = (scratch.0.join("target"), scratch.0.join("link"));
    fs::write(&target, "").unwrap();
    fs::set_permissions(&target, fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    for file in [&target, &link] {
        assert!(open_to_all(file, Policy::Any).is_err());
    }
    assert_eq!(fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn only_sockets_of_dead_processes_are_removed() {
    let scratch = Scratch::new();
    let sockets = scratch.sockets();
    let name = |number: u64| format!("{PREFIX}{number:016x}");
    let alive = DeviceId { process: 1, nonce: 1, directory: sockets.identity() };
    let listener = listen(&sockets, alive, Policy::User);
    // Dropping a listener of the standard library leaves its file, as a killed process does.
    for file in [name(2), name(3), "other".into(), format!("{PREFIX}2"), format!("{PREFIX}{:016X}", 0xabc)] {
        let socket = new_socket().unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(scratch.0.join(file)).unwrap()).unwrap();
    }
    fs::write(scratch.0.join(name(4)), "").unwrap();
    std::os::unix::fs::symlink(scratch.0.join("other"), scratch.0.join(name(5))).unwrap();
    let stream = UnixListener::bind(scratch.0.join(name(6))).unwrap();
    let before = scratch.names();
    remove_dead(&scratch.0, SETTLED);
    assert_eq!(scratch.names(), before, "young sockets stay");
    remove_dead(&scratch.0, Duration::ZERO);
    let removed: Vec<_> = before.into_iter().filter(|file| !scratch.names().contains(file)).collect();
    assert_eq!(removed, [name(2), name(3)]);
    sockets.connect(alive, Policy::User, soon()).unwrap();
    drop((listener, stream));
}

#[test]
fn the_work_of_removing_is_bounded() {
    let scratch = Scratch::new();
    for number in 0..PROBES as u64 + 5 {
        let socket = new_socket().unwrap();
        let path = scratch.0.join(format!("{PREFIX}{number:016x}"));
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    }
    remove_dead(&scratch.0, Duration::ZERO);
    assert_eq!(scratch.names().len(), 5);
    remove_dead(&scratch.0, Duration::ZERO);
    assert_eq!(scratch.names().len(), 0);
}
