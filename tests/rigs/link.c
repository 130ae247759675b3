/* A slow network on one machine: two packet devices (tun), one here and one in a network namespace of this process.

   link ONE_WAY_MS MB_PER_S BUFFER_KB LOST_PER_100000

   Each direction has a rate, a buffer that drops what it cannot hold, a delay, and losses at random; handshakes, slow
   start and retransmission are the kernel's own. Prints the two addresses, here and there, once both are up. Ends with
   the thread that started it; the devices and the namespace end with this process and those that entered it. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define LARGEST 70000 /* bytes of a packet: the kernel hands over up to 64 KiB at once */
#define SUBNETS 256   /* as many links at once: 10.79.0.0/30 .. 10.79.255.0/30 */

typedef struct packet {
    struct packet *next;
    int64_t due;
    ssize_t size;
    char data[];
} packet;

typedef struct {
    int from, to;
    double rate;           /* bytes a nanosecond */
    int64_t delay, buffer; /* nanoseconds, bytes */
    int lost;              /* of 100,000 packets */
    int64_t busy;          /* until when the line sends what was taken */
    packet *first, **last;
    pthread_mutex_t lock;
    pthread_cond_t filled;
} direction;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void *take(void *argument) {
    direction *way = argument;
    static __thread char data[LARGEST];
    unsigned seed = 1;
    for (;;) {
        ssize_t size = read(way->from, data, sizeof data);
        if (size <= 0) {
            if (size < 0 && errno != EINTR) fail("read");
            continue;
        }
        if (way->lost && rand_r(&seed) % 100000 < way->lost) continue;
        pthread_mutex_lock(&way->lock);
        int64_t time = now(), begin = way->busy > time ? way->busy : time;
        if ((begin - time) * way->rate <= way->buffer) {
            packet *taken = malloc(sizeof *taken + size);
            if (!taken) fail("malloc");
            memcpy(taken->data, data, size);
            way->busy = begin + (int64_t)(size / way->rate);
            taken->next = NULL, taken->size = size, taken->due = way->busy + way->delay;
            *way->last = taken, way->last = &taken->next;
            pthread_cond_signal(&way->filled);
        }
        pthread_mutex_unlock(&way->lock);
    }
    return NULL;
}

static void *give(void *argument) {
    direction *way = argument;
    for (;;) {
        pthread_mutex_lock(&way->lock);
        while (!way->first) pthread_cond_wait(&way->filled, &way->lock);
        packet *given = way->first;
        if (!(way->first = given->next)) way->last = &way->first;
        pthread_mutex_unlock(&way->lock);
        struct timespec due = {given->due / 1000000000, given->due % 1000000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL) == EINTR) {}
        if (write(way->to, given->data, given->size) < 0 && errno == EBADF) fail("write");
        free(given);
    }
    return NULL;
}

/* Return a new tun device of this namespace, or -1 if the name is taken; headers of virtio let it carry large packets. */
static int device(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    int file = open("/dev/net/tun", O_RDWR | O_CLOEXEC);
    if (file < 0) fail("/dev/net/tun");
    strcpy(request.ifr_name, name);
    if (ioctl(file, TUNSETIFF, &request) < 0) {
        if (errno != EBUSY) fail("TUNSETIFF");
        close(file);
        return -1;
    }
    if (ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0) fail("TUNSETOFFLOAD");
    return file;
}

/* Give a device of this namespace an address, if any, in a network of four, and set it up. */
static void up(const char *name, const char *address) {
    struct ifreq request = {0};
    struct sockaddr_in *internet = (struct sockaddr_in *)&request.ifr_addr;
    int file = socket(AF_INET, SOCK_DGRAM, 0);
    strcpy(request.ifr_name, name);
    if (address) {
        internet->sin_family = AF_INET;
        inet_pton(AF_INET, address, &internet->sin_addr);
        if (ioctl(file, SIOCSIFADDR, &request) < 0) fail("SIOCSIFADDR");
        inet_pton(AF_INET, "255.255.255.252", &internet->sin_addr);
        if (ioctl(file, SIOCSIFNETMASK, &request) < 0) fail("SIOCSIFNETMASK");
    }
    if (ioctl(file, SIOCGIFFLAGS, &request) < 0) fail("SIOCGIFFLAGS");
    request.ifr_flags |= IFF_UP;
    if (ioctl(file, SIOCSIFFLAGS, &request) < 0) fail("SIOCSIFFLAGS");
    close(file);
}

int main(int count, char **words) {
    static direction ways[2];
    char name[IFNAMSIZ], here[INET_ADDRSTRLEN], there[INET_ADDRSTRLEN];
    int near = -1, far, subnet = -1;
    if (count != 5) return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (near < 0) {
        if (++subnet == SUBNETS) return fprintf(stderr, "all %d links are in use\n", SUBNETS), 1;
        snprintf(name, sizeof name, "slow%d", subnet);
        near = device(name);
    }
    snprintf(here, sizeof here, "10.79.%d.1", subnet);
    snprintf(there, sizeof there, "10.79.%d.2", subnet);
    up(name, here);
    if (unshare(CLONE_NEWNET) < 0) fail("unshare");
    if ((far = device(name)) < 0) fail("TUNSETIFF");
    up("lo", NULL);
    up(name, there);
    /* Every connection starts as one to an unknown host, whatever those before it have measured. */
    FILE *setting = fopen("/proc/sys/net/ipv4/tcp_no_metrics_save", "w");
    if (setting) fputs("1", setting), fclose(setting);
    for (int i = 0; i < 2; i++) {
        direction *way = &ways[i];
        pthread_t thread;
        way->from = i ? near : far, way->to = i ? far : near;
        way->delay = atof(words[1]) * 1e6, way->rate = atof(words[2]) * 1e-3;
        way->buffer = atof(words[3]) * 1e3, way->lost = atoi(words[4]);
        way->last = &way->first;
        pthread_mutex_init(&way->lock, NULL);
        pthread_cond_init(&way->filled, NULL);
        if (pthread_create(&thread, NULL, take, way) || pthread_create(&thread, NULL, give, way)) fail("thread");
    }
    printf("%s %s\n", here, there);
    fflush(stdout);
    for (;;) pause();
}
