//! The limits and settings of the machine and of this user that matter for RDMA.

use serde_json::{Value, json};
use tonic_rdma::unstable::Processors;
use tonic_rdma_commands::units;
use tonic_rdma_verbs::unstable;

/// A setting or limit, and advice about it.
#[derive(Debug)]
pub(crate) struct Finding {
    /// Its name in JSON.
    pub(crate) name: &'static str,
    /// Its name for people, and what was found, in words.
    pub(crate) what: &'static str,
    pub(crate) found: String,
    /// What was found, for programs: an object.
    pub(crate) values: Value,
    /// Advice, if something should be changed.
    pub(crate) advice: Option<String>,
}

impl Finding {
    /// Returns the object for programs, with the advice.
    pub(crate) fn to_json(&self) -> Value {
        let mut values = self.values.clone();
        if let Some(advice) = &self.advice {
            values["advice"] = json!(advice);
        }
        values
    }
}

/// Returns all findings.
pub(crate) fn findings() -> Vec<Finding> {
    let soft = [soft_folder(), soft_peers(), identity(), boot()];
    [memlock(), open_files(), processors(), huge_pages(), kernel_devices()].into_iter().chain(soft).collect()
}

/// Checks the processors and the CPU limit. Both decide how long an end that waits polls.
fn processors() -> Finding {
    let it = Processors::current();
    let limit = it.limit.map(|limit| format!(", limited to {} CPUs", units::digits(f64::from(limit) / 1e3)));
    let plural = if it.cores == 1 { "core" } else { "cores" };
    let found = format!("{} CPUs of {} {plural}{}", it.cpus, it.cores, limit.unwrap_or_default());
    let limit_cpus = it.limit.map(|limit| f64::from(limit) / 1e3);
    let values = json!({ "cpus": it.cpus, "cores": it.cores, "limit_cpus": limit_cpus });
    let advice = "below two CPUs an end that waits sleeps after 20 µs, and below one CPU at once: a higher limit of its control \
                  groups lets it poll for longer";
    let advice = it.is_limited().then(|| advice.to_owned());
    Finding { name: "processors", what: "processors", found, values, advice }
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
    let values = json!({ "limit_bytes": limit });
    Finding { name: "locked_memory", what: "locked memory (RLIMIT_MEMLOCK)", found, values, advice }
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
    let values = json!({ "limit": limit });
    Finding { name: "open_files", what: "open files (RLIMIT_NOFILE)", found, values, advice }
}

/// Checks whether the kernel gives huge pages to registered memory.
fn huge_pages() -> Finding {
    let (name, what) = ("huge_pages", "huge pages for shared memory");
    let Ok(setting) = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled") else {
        let (found, values) = ("not known to this kernel".into(), json!({ "setting": null, "given": false }));
        return Finding { name, what, found, values, advice: None };
    };
    let chosen = setting.split(['[', ']']).nth(1).unwrap_or("unknown");
    let given = ["always", "within_size", "advise", "force"].contains(&chosen);
    let values = json!({ "setting": chosen, "given": given });
    let advice = (!given).then(|| {
        "optional, for large messages: \
         echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
            .to_owned()
    });
    Finding { name, what, found: chosen.to_owned(), values, advice }
}

/// Checks whether this user may open the files of the kernel's RDMA devices.
fn kernel_devices() -> Finding {
    let (name, what) = ("kernel_devices", "/dev/infiniband");
    let Ok(entries) = std::fs::read_dir(what) else {
        let found = "not there: no RDMA device has a driver loaded".into();
        let values = json!({ "present": false, "closed": [] });
        return Finding { name, what, found, values, advice: None };
    };
    let closed: Vec<String> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| std::fs::OpenOptions::new().read(true).write(true).open(path).is_err())
        .map(|path| path.display().to_string())
        .collect();
    let values = json!({ "present": true, "closed": closed });
    if closed.is_empty() {
        return Finding { name, what, found: "there, and open to this user".into(), values, advice: None };
    }
    let advice = Some("give this user access (group rdma, or a udev rule), or run as one that has it".into());
    let found = format!("there, but closed to this user: {}", closed.join(", "));
    Finding { name, what, found, values, advice }
}

/// Checks where the software device finds its peers. Both sides of a connection need the same folder.
fn soft_folder() -> Finding {
    let (found, advice) = match unstable::soft_location() {
        Ok(found) => (found, None),
        Err(error) => {
            let advice = format!("{error}; give RDMA_SOFT_DIR a directory that both sides can write to");
            ("no place".to_owned(), Some(advice))
        }
    };
    let (directory, usable) = (std::env::var("RDMA_SOFT_DIR").ok(), advice.is_none());
    let values = json!({ "directory": directory, "usable": usable });
    Finding { name: "soft_location", what: "the software device finds peers in", found, values, advice }
}

/// Finds out which processes the software device lets in, and whether those of this user may read the memory
/// of others.
fn soft_peers() -> Finding {
    let admits_any = unstable::soft_admits_any_user();
    let found = match admits_any {
        true => "all processes that can open its socket (RDMA_SOFT_PEERS=any)",
        false => "processes of this user",
    };
    let shares = unstable::soft_shares_with_user();
    let values = json!({ "any_user": admits_any, "shares_memory": shares.is_ok() });
    let (found, advice) = match shares {
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
    Finding { name: "soft_peers", what: "the software device lets in", found, values, advice }
}

/// Says who this process is. Two containers of one host may differ in all of it.
fn identity() -> Finding {
    let user = rustix::process::geteuid().as_raw();
    let mut found = format!("uid {user}");
    let mut values = json!({ "uid": user });
    for name in ["net", "user", "pid"] {
        let link = std::fs::read_link(format!("/proc/self/ns/{name}"));
        let link = link.map_or(format!("{name}:unknown"), |target| target.display().to_string());
        let number = link.trim_matches(|character: char| !character.is_ascii_digit());
        values[format!("{name}_namespace")] = json!(number.parse::<u64>().ok());
        found += &format!(", {link}");
    }
    Finding { name: "process", what: "this process", found, values, advice: None }
}

/// Reads what is equal for processes that can share memory: on which boot of which kernel they run.
fn boot() -> Finding {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let id = id.map(|text| text.trim().to_owned());
    let (values, found) = (json!({ "id": id }), id.unwrap_or_else(|| "unknown".into()));
    Finding { name: "boot", what: "boot", found, values, advice: None }
}
