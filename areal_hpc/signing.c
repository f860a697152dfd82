/* Loaded before libc into the processes that form groups (LD_PRELOAD); see signing.py.

   Each TCP socket that one of LIBRARIES listens on or connects gets the key in $AREAL_HPC_SOCKET_KEY's file, for peers of
   any address: from then on Linux signs what it sends (RFC 2385) and drops what comes without the same key's signature,
   the first segment of a connection included. One that cannot be given the key does not listen, nor connect.

   It asks libc for nothing that is newer than 2.14, so that it also works in the older one of a container. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MD5SIG_EXT = 32, WITH_PREFIX = 1, LONGEST_KEY = 80 }; /* linux/tcp.h; libc's headers may not know them */

/* Whose sockets know no secret of their own. Python's, which HTTP goes through, are none of these. */
static const char *const LIBRARIES[] = {"libtorch", "libgloo", "libnccl", "libhccl", "libzmq"};

struct signature { /* struct tcp_md5sig of linux/tcp.h */
  struct sockaddr_storage peers;
  uint8_t flags;
  uint8_t prefix_length;
  uint16_t key_length;
  uint32_t interface;
  uint8_t key[LONGEST_KEY];
};

struct search {
  uintptr_t address;
  int found;
};

/* Called for each loaded object until it returns 1: is the address in this one, and is it one of LIBRARIES? */
static int look(struct dl_phdr_info *object, size_t size, void *data) {
  struct search *search = data;
  (void)size;
  for (int i = 0; i < object->dlpi_phnum; i++) {
    const ElfW(Phdr) *part = &object->dlpi_phdr[i];
    if (part->p_type != PT_LOAD || search->address - object->dlpi_addr - part->p_vaddr >= part->p_memsz) continue;
    const char *slash = strrchr(object->dlpi_name, '/');
    const char *name = slash ? slash + 1 : object->dlpi_name;
    for (size_t k = 0; k < sizeof LIBRARIES / sizeof *LIBRARIES; k++)
      if (!strncmp(name, LIBRARIES[k], strlen(LIBRARIES[k]))) search->found = 1;
    return 1;
  }
  return 0;
}

/* The key in the file into `signature`; -1 with errno where there is none. */
static int read_key(const char *path, struct signature *signature) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  ssize_t length = read(file, signature->key, LONGEST_KEY);
  close(file);
  if (length == 0) errno = ENOKEY;
  if (length <= 0) return -1;
  signature->key_length = (uint16_t)length;
  return 0;
}

/* Give `fd` the key if it is a TCP socket and who asks is one of LIBRARIES; -1 with errno where that fails. */
static int sign(int fd, const void *caller) {
  struct sockaddr_storage own;
  socklen_t size = sizeof own;
  int type = 0;
  socklen_t type_size = sizeof type;
  struct search search = {(uintptr_t)caller, 0};
  const char *path = getenv("AREAL_HPC_SOCKET_KEY");
  if (!path) return 0;
  dl_iterate_phdr(look, &search);
  if (!search.found) return 0;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_size) || type != SOCK_STREAM) return 0;
  if (getsockname(fd, (struct sockaddr *)&own, &size)) return 0;
  if (own.ss_family != AF_INET && own.ss_family != AF_INET6) return 0;

  struct signature signature;
  memset(&signature, 0, sizeof signature); /* a prefix of no bits: every peer */
  signature.peers.ss_family = own.ss_family;
  signature.flags = WITH_PREFIX;
  if (read_key(path, &signature)) return -1;
  if (setsockopt(fd, IPPROTO_TCP, MD5SIG_EXT, &signature, sizeof signature)) return -1;
  if (own.ss_family == AF_INET) return 0;
  struct in6_addr *mapped = &((struct sockaddr_in6 *)&signature.peers)->sin6_addr; /* IPv4 peers of an IPv6 socket */
  mapped->s6_addr[10] = mapped->s6_addr[11] = 0xff;
  return setsockopt(fd, IPPROTO_TCP, MD5SIG_EXT, &signature, sizeof signature);
}

int listen(int fd, int backlog) {
  return sign(fd, __builtin_return_address(0)) ? -1 : (int)syscall(SYS_listen, fd, backlog);
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
  return sign(fd, __builtin_return_address(0)) ? -1 : (int)syscall(SYS_connect, fd, address, size);
}

/* By which a process sees that this was loaded into it. */
const char areal_hpc_signs[] = "yes";
