//! The limits and settings of the machine and of this user that matter for RDMA.

use serde::Serialize;
use tonic_rdma::unstable::Processors;
use tonic_rdma_commands::units;
use tonic_rdma_verbs::unstable;

/// A setting or limit, and advice about it.
#[derive(Debug, Serialize)]
pub(crate) struct Finding {
    pub(crate) what: &'static str,
    pub(crate) found: String,
    /// Advice, if something should be changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) advice: Option<String>,
}

/// Returns all findings.
pub(crate) fn findings() -> Vec<Finding> {
    let soft = [soft_folder(), soft_peers(), identity()];
    [memlock(), open_files(), processors(), huge_pages(), kernel_devices()].into_iter().chain(soft).collect()
}

/// Checks the processors and the CPU limit. Both decide how long an end that waits polls.
fn processors() -> Finding {
    let it = Processors::current();
    let limit = it.limit.map(|limit| format!(", limited to {} CPUs", units::digits(f64::from(limit) / 1e3)));
    let plural = if it.cores == 1 { "core" } else { "cores" };
    let found = format!("{} CPUs of {} {plural}{}", it.cpus, it.cores, limit.unwrap_or_default());
    let advice = "below two CPUs an end that waits sleeps after 20 µs, and below one CPU at once: a higher limit of its control \
                  groups lets it poll for longer";
    Finding { what: "processors", found, advice: it.is_limited().then(|| advice.to_owned()) }
}

/// Checks the limit on locked memory. Devices of the kernel lock the memory that they register.
fn memlock() -> Finding {
    const LITTLE: u64 = 64 << 20;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let found = limit.map_or("unlimited".to_owned(), units::rough_size);
    let advice = limit.filter(|limit| *limit < LITTLE).map(|_| {
        "too little for a hardware device (the software device locks nothing): raise it with `ulimit -l unlimited`, \
         LimitMEMLOCK=infinity in a systemd unit, or memlock in /etc/security/limits.conf"
            .to_owned()
    });
    Finding { what: "locked memory (RLIMIT_MEMLOCK)", found, advice }
}

/// Checks the limit on open files. A connection holds two descriptors.
fn open_files() -> Finding {
    const FEW: u64 = 4096;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let found = limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let advice = limit.filter(|limit| *limit < FEW).map(|limit| {
        format!(
            "a connection holds two descriptors, so about {} fit: raise it with `ulimit -n 65536`",
            limit / 2
        )
    });
    Finding { what: "open files (RLIMIT_NOFILE)", found, advice }
}

/// Checks whether the kernel gives huge pages to registered memory.
fn huge_pages() -> Finding {
    let what = "huge pages for shared memory";
    let Ok(setting) = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled") else {
        return Finding { what, found: "not known to this kernel".into(), advice: None };
    };
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or("unknown");
    let given = ["always", "within_size", "advise", "force"].contains(&chosen);
    let advice = (!given).then(|| {
        "optional, for large messages: \
         echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
            .to_owned()
    });
    Finding { what, found: chosen.to_owned(), advice }
}

/// Checks whether this user may open the files of the kernel's RDMA devices.
fn kernel_devices() -> Finding {
    let what = "/dev/infiniband";
    let Ok(entries) = std::fs::read_dir(what) else {
        return Finding { what, found: "not there: no RDMA device has a driver loaded".into(), advice: None };
    };
    let closed: Vec<String> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| std::fs::OpenOptions::new().read(true).write(true).open(path).is_err())
        .map(|path| path.display().to_string())
        .collect();
    if closed.is_empty() {
        return Finding { what, found: "there, and open to this user".into(), advice: None };
    }
    let advice = Some("give this user access (group rdma, or a udev rule), or run as one that has it".into());
    Finding { what, found: format!("there, but closed to this user: {}", closed.join(", ")), advice }
}

/// Checks where the software device finds its peers. Both sides of a connection need the same folder.
fn soft_folder() -> Finding {
    let what = "the software device finds peers in";
    match unstable::soft_location() {
        Ok(found) => Finding { what, found, advice: None },
        Err(error) => Finding {
            what,
            found: "no place".into(),
            advice: Some(format!("{error}; give RDMA_SOFT_DIR a directory that both sides can write to")),
        },
    }
}

/// Finds out which processes the software device lets in, and whether those of this user may read the memory
/// of others.
fn soft_peers() -> Finding {
    let admits_any = unstable::soft_admits_any_user();
    let found = match admits_any {
        true => "all processes that can open its socket (RDMA_SOFT_PEERS=any)",
        false => "processes of this user",
    };
    let (found, advice) = match unstable::soft_shares_with_user() {
        Ok(()) => (found.to_owned(), None),
        Err(reason) => {
            let advice = "optional, for large messages, if you trust all programs of this user: RDMA_SOFT_PEERS=trusted-user at \
                          both sides";
            // With trusted-user, other users could not come any more.
            let advice = (!admits_any).then(|| advice.to_owned());
            (
                format!("{found}; no other process may read the memory of this process, because {reason}"),
                advice,
            )
        }
    };
    Finding { what: "the software device lets in", found, advice }
}

/// Checks what decides whether two processes can share memory. The outputs on both sides show where they
/// differ.
fn identity() -> Finding {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let boot = boot.map_or("unknown".into(), |text| text.trim().to_owned());
    let namespace = |name: &str| {
        let link = std::fs::read_link(format!("/proc/self/ns/{name}"));
        link.map_or(format!("{name}:unknown"), |target| target.display().to_string())
    };
    let namespaces = ["net", "user", "pid"].map(namespace).join(", ");
    let user = rustix::process::geteuid().as_raw();
    Finding { what: "this process", found: format!("uid {user}, {namespaces}, boot {boot}"), advice: None }
}
